"""Tensor-parallel runs equal the run of one process and resume on another mesh."""

import json
import shutil

import pytest

from halfbyte.train.run import train
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.rank_runs import configured, run, write_place

pytestmark = pytest.mark.dist

KEYS = {"save_steps": 3, "save_total_limit": 9}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"), intermediate_size=128)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=2, **KEYS)


@pytest.fixture(scope="module")
def divided(place, two, tmp_path_factory):
    keys = {"gradient_accumulation_steps": 2, "parallel": {"tensor": 2}, **KEYS}
    return run(two, place, tmp_path_factory.mktemp("divided") / "out", **keys)


@pytest.mark.slow
def test_tensor_parallel_run_equals_one_process(alone, divided):
    divided.same_as(alone)
    assert json.loads((divided.folder / "checks.json").read_text())["adapter_reload"]["equal"]


def resumed(ranks, place, left, folder, **keys):
    """Resume from the first checkpoint of a copy of the run `left`."""
    shutil.copytree(left.folder, folder)
    shutil.rmtree(folder / "adapter")
    return run(ranks, place, folder, resume=str(folder / "checkpoint-3"), **keys, **KEYS)


@pytest.mark.slow
def test_resumed_by_one_process_and_by_two(alone, divided, place, two, tmp_path):
    resumed(None, place, divided, tmp_path / "one", gradient_accumulation_steps=2).same_as(alone)
    parallel = {"gradient_accumulation_steps": 2, "parallel": {"tensor": 2}}
    resumed(two, place, alone, tmp_path / "two", **parallel).same_as(alone)


@pytest.mark.parametrize(
    "keys",
    [
        {"lora_bias": True},
        {"use_dora": True},
        pytest.param({"use_peft": False, "load_in_4bit": False}, marks=pytest.mark.slow),
    ],
)
def test_unsupported_adapters_and_full_training_are_refused(place, two, tmp_path, keys):
    assert set(two.run(refused, place, tmp_path / "out", keys)) <= {"ConfigError", "ModelError"}
    assert not (tmp_path / "out").exists()


def refused(mesh, place, output, keys):
    """Return the error class of this rank; ranks that raise would be started anew."""
    with pytest.raises(HalfbyteError) as raised:
        train(configured(place, output, parallel={"tensor": 2}, **keys))
    return type(raised.value).__name__
