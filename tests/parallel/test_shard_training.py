"""Whole runs whose frozen weights are sharded are the run of one process."""

import json

import pytest
from whole import run, write_place

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=4, save_steps=2)


def test_two_slices_are_the_run_of_one_process(place, alone, two, tmp_path):
    keys = {"gradient_accumulation_steps": 2, "save_steps": 2, "parallel": {"shard": 2}}
    found = run(two, place, tmp_path / "out", **keys)
    found.same_as(alone)
    assert json.loads((found.folder / "checks.json").read_text())["adapter_reload"]["equal"]
