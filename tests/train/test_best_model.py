"""The best evaluation of a run: its checkpoint stays, its weights are the run's, and early stopping counts from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.config import load_config
from halfbyte.reading.tensors import read_tensors
from halfbyte.report.run import read_run
from halfbyte.runs import checkpoints
from halfbyte.train.loop import TrainingLoop
from halfbyte.train.run import train
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


def test_training_stops_after_evaluations_without_an_improvement(place, tmp_path, held_out_losses):
    """As in transformers: 2.95 is the best, but not enough of an improvement to wait longer."""
    held_out_losses({1: 5.0, 2: 3.0, 3: 2.95, 4: 3.0})
    early = {"early_stopping_patience": 2, "early_stopping_threshold": 0.1}
    run(place, tmp_path, **BEST | early)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-4"]
    assert read_run(tmp_path).best == {"metric": "loss", "value": 2.95, "step": 3, "loaded": True, "stopped": 4}
    before = (tmp_path / "environment.json").read_bytes()
    config = load_config(None, keys(place, tmp_path, **BEST | early))
    train(config, resume=True)  # it is finished
    assert (tmp_path / "environment.json").read_bytes() == before
    train(load_config(None, keys(place, tmp_path, **BEST | early | {"early_stopping_patience": 3})), resume=True)
    assert read_run(tmp_path).best["stopped"] == 5


@pytest.mark.parametrize("peft", [pytest.param(True, marks=pytest.mark.slow), False])
def test_schedule_free_weights_of_the_best_evaluation_are_saved(place, tmp_path, held_out_losses, peft):
    pytest.importorskip("schedulefree")
    held_out_losses({2: 1.0})
    more = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "max_steps": 3}
    more |= {} if peft else {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0}
    run(place, tmp_path, **BEST | more)
    file = ADAPTER if peft else "model.safetensors"
    saved, best = (
        read_tensors(tmp_path / name / file, "") for name in ("adapter" if peft else "model", "checkpoint-2")
    )
    assert all((saved[name].float() == best[name].to(saved[name].dtype).float()).all() for name in best)


@pytest.mark.slow
def test_a_schedule_follows_the_metric_over_a_resume(place, tmp_path, held_out_losses):
    """The learning rate falls to a tenth after two evaluations that are no better."""
    held_out_losses({1: 1.0})
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 1}, "save_steps": 2}
    more = {"eval_steps": 1, "sample_prompts": 0, "save_total_limit": None} | plateau
    run(place, tmp_path / "whole", **more)
    rates = [record["learning_rate"] for record in read_run(tmp_path / "whole").train]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 1e-3, 1e-3, 1e-4])
    run(place, tmp_path / "resumed", **more, resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    assert [record["learning_rate"] for record in read_run(tmp_path / "resumed").train] == rates[2:]
    assert (tmp_path / "resumed/adapter" / ADAPTER).read_bytes() == (tmp_path / "whole/adapter" / ADAPTER).read_bytes()


@pytest.mark.slow
def test_a_run_that_continues_elsewhere_takes_its_best_checkpoint_along(place, tmp_path, held_out_losses):
    held_out_losses({2: 1.0})
    run(place, tmp_path / "first", **BEST | {"save_steps": 4, "save_total_limit": None})
    there = {"resume_from_checkpoint": str(tmp_path / "first/checkpoint-4")}
    run(place, tmp_path / "second", **BEST | there)
    assert [path.name for path in checkpoints.checkpoints(tmp_path / "second")] == ["checkpoint-2", "checkpoint-6"]
    assert read_run(tmp_path / "second").best["step"] == 2


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"metric_for_best_model": "bleu"}, "metric_for_best_model"),
        ({"metric_for_best_model": "eval_rewards/margins"}, "metric_for_best_model"),
        ({"eval_split_size": 0}, "load_best_model_at_end"),
        ({"load_best_model_at_end": False, "metric_for_best_model": "loss"}, "metric_for_best_model"),
    ],
)
def test_what_no_evaluation_decides_is_refused(place, tmp_path, changed, key):
    with pytest.raises(ConfigError) as refused:
        run(place, tmp_path / "out", **BEST | changed)
    assert key in refused.value.message
    assert refused.value.fix
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_rewards_are_maximized(place, tmp_path, monkeypatch):
    """For policy optimization the default is the mean reward, and each function's reward can decide."""
    from halfbyte.rl.rollouts import PolicyRollouts

    rewards = iter([0.1, 0.5, 0.9, 0.4])
    evaluate = PolicyRollouts.evaluate
    monkeypatch.setattr(PolicyRollouts, "evaluate", lambda *a: evaluate(*a) | {"rewards/regex/mean": next(rewards)})
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    more = {"method": "grpo", "num_generations": 2, "reward_funcs": [{"regex": "[0-9]"}], "max_completion_length": 3}
    more |= {
        "max_steps": 3,
        "eval_split_size": 2,
        "dataset": str(prompts),
        "metric_for_best_model": "rewards/regex/mean",
    }
    run(place, tmp_path / "out", **BEST | more)
    assert read_run(tmp_path / "out").best["step"] == 2
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_the_same(place, tmp_path):
    """In steps, between evaluation and save, while a record or a checkpoint is written: best, patience and rates."""
    more = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.02}}
    more |= {"early_stopping_patience": 3, "early_stopping_threshold": 0.02, "max_steps": 12, "learning_rate": 5e-2}
    config = keys(place, tmp_path, **BEST | more | {"save_steps": 3})
    settings = {"config": config, "output": str(tmp_path), "moments": [2, 3, 4, 7, 8, 9, 12]}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tests.helpers.killed_policy", str(tmp_path / "settings.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == 7
    assert not [report for report in reports if report["status"] or report["differs"]]
