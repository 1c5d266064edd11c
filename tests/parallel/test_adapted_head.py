"""Runs with an adapter on the head over several processes equal the run of one process."""

import pytest

from tests.helpers.rank_runs import run, write_place

pytestmark = [pytest.mark.dist, pytest.mark.slow]
KEYS = {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.0, "max_steps": 3, "sample_prompts": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=4, **KEYS)


@pytest.mark.parametrize("axis", ["data", "shard", "context", "pipeline"])
def test_an_adapted_head_is_trained_as_on_one_process(place, alone, two, tmp_path, axis):
    accumulation = 2 if axis in ("data", "shard") else 4
    keys = KEYS | {"gradient_accumulation_steps": accumulation, "parallel": {axis: 2}}
    found = run(two, place, tmp_path / "out", **keys)
    found.same_as(alone)
    assert any("lm_head.lora_B" in name for name in found.adapter)
