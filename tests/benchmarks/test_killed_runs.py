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


def test_compared_records():
    calm = records(4.0, 2.0, 1.0)
    assert killed_runs.compared(records(4.0, 2.0, 1.0), calm) == {
        "same_steps": True, "most_apart": 0.0, "steps_apart": 0,
    }  # fmt: skip
    assert killed_runs.compared(records(4.0, 2.5, 1.0), calm) == {
        "same_steps": True, "most_apart": 0.25, "steps_apart": 1,
    }  # fmt: skip
    assert killed_runs.compared(records(4.0, 2.0), calm)["same_steps"] is False


def test_choice_of_rank_and_step_is_seeded(monkeypatch, tmp_path):
    options = given(gpus=4, steps=40)
    seen = []

    class Chance(killed_runs.random.Random):
        def randrange(self, *bounds):
            seen.append(super().randrange(*bounds))
            return seen[-1]

    def popen(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(killed_runs.subprocess, "Popen", popen)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            killed_runs.kill(options, tmp_path / "run", Chance(7))
    assert seen[:2] == seen[2:]
    assert 0 <= seen[0] < 4
    assert killed_runs.SAVE_STEPS < seen[1] < 30
