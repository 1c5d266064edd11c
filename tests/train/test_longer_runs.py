"""A finished run continues if `num_train_epochs` or `max_steps` grows; a smaller number is refused."""

import pytest

from halfbyte.config import load_config
from halfbyte.report.run import read_run
from halfbyte.runs import checkpoints
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError
from tests.helpers.sft_runs import keys, run

MORE = {"sample_prompts": 0, "eval_split_size": 0, "save_steps": 3, "max_steps": -1, "num_train_epochs": 1.0}
ADAPTER = "adapter/adapter_model.safetensors"


def resume(place, output, **changed):
    return train(load_config(None, keys(place, output, **MORE | changed)), resume=True)


@pytest.mark.slow
def test_a_constant_schedule_continues_as_if_the_run_had_been_long_from_the_start(place, tmp_path):
    constant = {"lr_scheduler_type": "constant"}
    run(place, tmp_path / "whole", **MORE | constant | {"num_train_epochs": 2.0})
    run(place, tmp_path / "grown", **MORE | constant)
    first = (tmp_path / "grown" / ADAPTER).read_bytes()
    resume(place, tmp_path / "grown", **constant, num_train_epochs=2.0)
    assert first != (tmp_path / "grown" / ADAPTER).read_bytes() == (tmp_path / "whole" / ADAPTER).read_bytes()
    losses = [[record["loss"] for record in read_run(tmp_path / name).train] for name in ("whole", "grown")]
    assert losses[0] == losses[1]


def test_the_schedule_is_computed_over_the_new_length(place, tmp_path):
    run(place, tmp_path, **MORE)
    steps = checkpoints.step_of(checkpoints.checkpoints(tmp_path)[-1])
    resume(place, tmp_path, max_steps=2 * steps)
    grown = [record["learning_rate"] for record in read_run(tmp_path).train]
    run(place, tmp_path / "whole", **MORE | {"max_steps": 2 * steps})
    assert grown[steps:] == [record["learning_rate"] for record in read_run(tmp_path / "whole").train][steps:]
    assert "longer-run" in read_run(tmp_path).environment["notices"]


def test_a_shorter_run_is_refused(place, tmp_path):
    run(place, tmp_path, **MORE)
    environment = (tmp_path / "environment.json").read_bytes()
    for key, shorter in (("num_train_epochs", 0.5), ("max_steps", 3)):
        with pytest.raises(ConfigError) as refused:
            resume(place, tmp_path, **{key: shorter})
        assert key in refused.value.message
        assert (tmp_path / "environment.json").read_bytes() == environment
