"""`adapters` and `sweep`: the runs that they describe, and what is refused by name."""

import pytest

from halfbyte.config import RunConfig, dump_config, dump_given, load_config
from halfbyte.config.several import DIFFERING, LARGEST_SWEEP, SINGLE, adapter_runs
from halfbyte.utils.errors import ConfigError

BASE = {"model_name_or_path": "m", "dataset": "d", "output_dir": "o"}


def test_a_sweep_is_a_run_for_each_combination():
    runs = adapter_runs(load_config(None, BASE | {"sweep": {"learning_rate": [1e-4, 2e-5], "r": [8, 32]}}))
    assert [(run.learning_rate, run.r) for run in runs.values()] == [(1e-4, 8), (1e-4, 32), (2e-5, 8), (2e-5, 32)]
    assert runs["learning_rate-0.0001_r-8"].output_dir == "o/adapters/learning_rate-0.0001_r-8"
    assert not any(run.trains_several for run in runs.values())


def test_adapters_have_their_own_data_and_other_tools_keys():
    entries = [{"name": "a", "dataset": "x", "lora_rank": 4}, {"name": "b", "dataset": ["y", "x"]}]
    config = load_config(None, {"model_name_or_path": "m", "r": 2, "adapters": entries})
    runs = adapter_runs(config)
    assert (runs["a"].dataset, runs["a"].r, runs["b"].dataset, runs["b"].r) == ("x", 4, ["y", "x"], 2)
    assert config.dataset == ["x", "y"]


@pytest.mark.parametrize("dump", [dump_given, dump_config])
def test_written_files_describe_the_same_runs(dump, tmp_path):
    config = load_config(
        None, BASE | {"sweep": {"learning_rate": [1e-4, 2e-5], "target_modules": [["q_proj"], "all-linear"]}}
    )
    (tmp_path / "run.yaml").write_text(dump(config))
    assert load_config(tmp_path / "run.yaml").sweep == config.sweep


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"sweep": {}}, "sweep"),
        ({"sweep": {"r": []}}, "r has no values"),
        ({"sweep": {"r": [8, 8]}}, "r"),
        ({"sweep": {"r": [0]}}, "r"),
        ({"sweep": {"max_length": [64, 128]}}, "max_length"),
        ({"sweep": {"lr": [1e-4]}}, "lr"),
        ({"sweep": {"r": list(range(1, LARGEST_SWEEP + 2))}}, str(LARGEST_SWEEP)),
        ({"sweep": {"init_lora_weights": ["pissa"]}}, "init_lora_weights"),
        ({"sweep": {"r": [8]}, "adapters": [{"name": "a"}]}, "sweep"),
        ({"adapters": []}, "adapters"),
        ({"adapters": "saved/adapter"}, "adapter_path"),
        ({"adapters": [{"r": 8}]}, "name"),
        ({"adapters": [{"name": "a"}, {"name": "A"}]}, "A"),
        ({"adapters": [{"name": "../a"}]}, "name"),
        ({"adapters": [{"name": "a", "model_name_or_path": "n"}]}, "model_name_or_path"),
        ({"adapters": [{"name": "a", "adapter_path": "n"}]}, "adapter_path"),
        ({"sweep": {"r": [8]}, "method": "dpo"}, "method"),
        ({"sweep": {"r": [8]}, "parallel": {"data": 2}}, "parallel"),
        ({"sweep": {"r": [8]}, "adapter_path": "n"}, "adapter_path"),
        ({"sweep": {"r": [8]}, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"sweep": {"r": [8]}, "resume_from_checkpoint": "out/checkpoint-2"}, "resume_from_checkpoint"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_input_is_refused_by_name(keys, name):
    with pytest.raises(ConfigError) as error:
        load_config(None, BASE | keys)
    assert name in f"{error.value.message} {error.value.fix}"


def test_named_keys_exist():
    assert set(DIFFERING) | set(SINGLE) <= set(RunConfig.model_fields)
