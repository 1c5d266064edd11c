"""The best evaluation of a run: its checkpoint stays, its weights are the run's, and early stopping counts from it."""

import json

import pytest

from halfbyte.config import load_config
from halfbyte.reading.tensors import read_tensors
from halfbyte.report.run import read_run
from halfbyte.runs import checkpoints
from halfbyte.train.loop import TrainingLoop
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError
from tests.helpers.sft_runs import keys, run

BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 100, "save_total_limit": 1, "sample_prompts": 0}
ADAPTER = "adapter_model.safetensors"


@pytest.fixture
def held_out_losses(monkeypatch):
    """A function that sets the loss of the evaluations, by their step."""

    def set_losses(losses):
        own = TrainingLoop._held_out_numbers

        def numbers(loop, *args):
            return own(loop, *args) | {"loss": losses.get(loop.state.global_step, 9.0)}

        monkeypatch.setattr(TrainingLoop, "_held_out_numbers", numbers)

    return set_losses


def test_the_run_ends_with_the_weights_of_its_best_evaluation(place, tmp_path, held_out_losses):
    held_out_losses({1: 5.0, 2: 3.0, 3: 4.0, 4: 3.0})
    result = run(place, tmp_path, **BEST)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-6"]
    saved, best = (read_tensors(tmp_path / name / ADAPTER, "") for name in ("adapter", "checkpoint-2"))
    assert all((saved[name] == best[name]).all() for name in best)
    report = read_run(tmp_path)
    assert (report.best["step"], report.best["value"], report.final_evaluation["step"]) == (2, 3.0, 2)
    assert (result.metrics["best_step"], result.metrics["eval_loss"]) == (2, 3.0)
    assert "after step 2" in (tmp_path / "README.md").read_text()
    assert "after step 2" in (tmp_path / "report.html").read_text()
