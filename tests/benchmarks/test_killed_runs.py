"""benchmarks.killed_runs: commands, and comparison of records. Runs that are killed: tests/parallel/test_killed.py."""

from pathlib import Path

import pytest

from benchmarks import killed_runs


def given(**keys):
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return killed_runs.parser().parse_args(words)


def records(*losses):
    return [{"step": step, "tokens": 8, "loss": loss} for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("gpus", "parallel"), [(4, ['parallel={"shard": 4}']), (2, ['parallel={"shard": 2}']), (1, [])]
)
def test_runs_that_resume_keep_the_accumulation_of_the_killed_run(gpus, parallel):
    words = killed_runs.command_of(given(way="shard"), Path("out"), gpus)
    assert [word for word in words if word.startswith("parallel=")] == parallel
    assert "gradient_accumulation_steps=1" in words
    assert ("device=cuda:0" in words) == (gpus == 1)
