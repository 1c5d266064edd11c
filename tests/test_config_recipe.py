"""Keys of recipes: each changes what it names, and none is taken where it would change nothing."""

import pytest

from halfbyte.config import RunConfig, load_config, resolve
from halfbyte.config.contradictions import RECIPE_OPTIONS as OPTIONS
from halfbyte.config.schema import RecipeSection
from halfbyte.utils.errors import ConfigError

OTHER = {"margin": 2, "amax_history_len": 16, "amax_compute_algo": "most_recent", "reduce_amax": False}
OTHER |= {key: True for key in OPTIONS["nvfp4"] if key != "four_over_six_metric"} | {"four_over_six_metric": "L1"}


def precision(**keys):
    return resolve(RunConfig(model_name_or_path="m", dataset="d", **keys)).precision


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
        assert f"it is of {recipe}" in str(caught.value)
        assert f"recipe: {other}" in str(caught.value)


def test_the_seed_of_a_run_draws_the_transform_of_nvfp4():
    from halfbyte.modeling.projections import configured_recipe

    assert configured_recipe(precision(recipe="nvfp4", seed=7)).seed == 7
    assert configured_recipe(precision()) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"recipe": "fp8-hybrid", "use_kernels": False}, "only fused forwards know recipes"),
        ({"recipe": "fp8-hybrid", "use_peft": False, "load_in_4bit": False}, "it is for frozen weights"),
        ({"recipe": "nvfp4", "four_over_six_metric": "L1"}, "decides nothing"),
        ({"recipe": "fp8"}, "recipe"),
    ],
)
def test_what_contradicts_a_recipe(keys, said):
    with pytest.raises(ConfigError, match=said):
        load_config(None, {"model_name_or_path": "m", "dataset": "d"} | keys)
