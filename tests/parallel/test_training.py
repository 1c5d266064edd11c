"""Data parallelism: the rows of each step, losses and files equal those of one process."""

import json

import pytest
from safetensors.torch import load_file

from halfbyte.train.run import train
from tests.helpers.rank_runs import configured, run, write_place

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    """Run on 19 rows in windows of four: the last window has three, with uneven numbers of tokens."""
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=4, save_steps=2)


FILES = {
    "README.md", "adapter", "checks.json", "config.resolved.yaml", "data_report.json", "environment.json",
    "generations.json", "memory.json", "metrics.jsonl", "report.html", "run.yaml", "status.json",
}  # fmt: skip


def test_data_parallel_run_equals_one_process(place, alone, two, tmp_path):
    found = run(two, place, tmp_path / "out", gradient_accumulation_steps=2, save_steps=2, parallel={"data": 2})
    found.same_as(alone)
    assert len(found.trained) == 5
    assert {path.name for path in found.folder.iterdir()} == FILES | {"checkpoint-4", "checkpoint-5"}
    assert len(json.loads((found.folder / "memory.json").read_text())["ranks"]) == 2
    assert "{data: 2}" in (found.folder / "report.html").read_text()


def test_indivisible_batch_is_refused(place, alone, two, tmp_path):
    keys = {"gradient_accumulation_steps": 3, "save_steps": 2, "max_steps": 2}
    run(None, place, tmp_path / "out", **keys)
    with pytest.raises(AssertionError, match=r"3 micro-batches.*2 processes"):
        run(two, place, tmp_path / "out", resume=True, parallel={"data": 2}, **keys)


def test_other_accumulation_on_equal_ranks_is_refused(place, alone):
    from halfbyte.utils.errors import ConfigError

    folder = alone.folder
    config = configured(place, folder, gradient_accumulation_steps=2, save_steps=2)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 4"):
        train(config, resume=str(folder / "checkpoint-4"))


def test_dropout_differs_between_ranks_and_resumes_exactly(place, two, tmp_path):
    keys = {"lora_dropout": 0.3, "parallel": {"data": 2}, "save_steps": 2, "gradient_accumulation_steps": 2}
    whole = run(two, place, tmp_path / "whole", **keys)
    folder = tmp_path / "again"
    run(two, place, folder, **keys)
    for path in (folder / "adapter", folder / "checkpoint-5"):
        path.rename(folder / f"{path.name}.away")
    again = run(two, place, folder, resume=str(folder / "checkpoint-4"), **keys)
    assert again.adapter.keys() == whole.adapter.keys()
    for name, tensor in again.adapter.items():
        assert tensor.equal(whole.adapter[name]), name
    states = [(whole.folder / "checkpoint-4" / name).read_bytes() for name in ("rng_state.pth", "rng_state_1.pth")]
    assert states[0] != states[1]


@pytest.mark.parametrize("name", ["pissa", "qera"])
def test_an_initialisation_from_weights_is_that_of_one_process(place, two, tmp_path, name):
    keys = {"init_lora_weights": name, "quantization": "nf4", "max_steps": 2}
    alone = run(None, place, tmp_path / "alone", gradient_accumulation_steps=4, **keys)
    found = run(two, place, tmp_path / "two", gradient_accumulation_steps=2, parallel={"data": 2}, **keys)
    found.same_as(alone)
    initial = [
        load_file(folder / "initial_adapter/adapter_model.safetensors") for folder in (alone.folder, found.folder)
    ]
    assert all(tensor.equal(initial[1][key]) for key, tensor in initial[0].items())
