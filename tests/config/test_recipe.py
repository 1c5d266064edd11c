"""Keys of recipes: each changes its option, and a key without effect is refused."""

import pytest

from halfbyte.config import RunConfig, load_config
from halfbyte.config.recipe import RECIPE_OPTIONS as OPTIONS
from halfbyte.config.recipe import RecipeSection
from halfbyte.utils.errors import ConfigError

OTHER = {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent", "reduce_amax": False}
OTHER |= {key: True for key in OPTIONS["nvfp4"] if key != "four_over_six_metric"} | {"four_over_six_metric": "L1"}


def precision(**keys):
    return RunConfig(model_name_or_path="m", dataset="d", **keys).precision


@pytest.mark.parametrize(("recipe", "key"), [(recipe, key) for recipe, keys in OPTIONS.items() for key in keys])
def test_each_option_reaches_its_recipe_and_no_other(recipe, key):
    from halfbyte.modeling.projections import configured_recipe

    keys = {key: OTHER[key]} | ({"enable_four_over_six": True} if key == "four_over_six_metric" else {})
    assert getattr(configured_recipe(precision(recipe=recipe, **keys)), key) == OTHER[key]
    assert getattr(configured_recipe(precision(recipe=recipe)), key) == RecipeSection.model_fields[key].default
    for other in {"bf16", *OPTIONS} - {recipe}:
        with pytest.raises(ConfigError) as caught:
            load_config(None, {"model_name_or_path": "m", "dataset": "d", "recipe": other, key: OTHER[key]})
        assert f"{key}: " in str(caught.value)
        assert f"{recipe}" in str(caught.value)
        assert f"recipe: {other}" in str(caught.value)


def test_the_seed_of_a_run_draws_the_transform_of_nvfp4():
    from halfbyte.modeling.projections import configured_recipe

    assert configured_recipe(precision(recipe="nvfp4", seed=7)).seed == 7
    assert configured_recipe(precision()) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"recipe": "fp8-hybrid", "use_kernels": False}, None),
        ({"recipe": "fp8-hybrid", "use_peft": False, "load_in_4bit": False}, None),
        ({"recipe": "nvfp4", "four_over_six_metric": "L1"}, None),
        ({"recipe": "fp8"}, "recipe"),
    ],
)
def test_contradictions_of_a_recipe_are_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"model_name_or_path": "m", "dataset": "d"} | keys)
