"""Answers by step and losses of single documents on several ranks, which equal those of one process."""

import json

import pytest

from tests.helpers.rank_runs import run, write_place

pytestmark = [pytest.mark.dist, pytest.mark.slow]
KEYS = {"gradient_accumulation_steps": 4, "sample_steps": 2, "row_losses": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", **KEYS)


def lines(run, name):
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_ranks_write_the_files_of_one_process(place, alone, two, tmp_path, axis):
    rows = 2 if axis == "data" else 4
    result = run(two, place, tmp_path / "out", **KEYS | {"gradient_accumulation_steps": rows}, parallel={axis: 2})
    assert lines(result, "samples.jsonl") == lines(alone, "samples.jsonl")
    documents, expected = lines(result, "row_losses.jsonl"), lines(alone, "row_losses.jsonl")
    for document, other in zip(documents, expected, strict=True):
        for moment in ("start", "end"):
            assert document.pop(moment) == pytest.approx(other[moment], rel=1e-3)
        assert document == {key: value for key, value in other.items() if key not in ("start", "end")}
