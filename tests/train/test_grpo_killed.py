"""GRPO that is SIGKILLed: in a rollout, while rewards are computed, in a step, while a record or a checkpoint is
written; resumed, it is the run that was left alone: completions, rewards, losses, adapter bytes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REWARD = """
def letters(prompts, completions, completion_ids, **columns):
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""
KEYS = {
    "device": "cpu", "dtype": "float32", "load_in_4bit": True, "r": 4, "method": "grpo", "num_generations": 4,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
    "max_completion_length": 10, "learning_rate": 2e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64,
    "save_steps": 1, "save_total_limit": 2, "eval_split_size": 2, "eval_steps": 2, "beta": 0.02,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "steps"), [pytest.param([5, 9], 4, id="2"), pytest.param(list(range(100, 120)), 6, id="20")]
)
def test_killed_at_random_moments(place, tmp_path, moments, steps):
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARD)
    config = KEYS | {
        "max_steps": steps,
        "model_name_or_path": str(place / "model"),
        "dataset": str(tmp_path / "prompts.jsonl"),
    }
    config |= {"reward_funcs": [f"{tmp_path / 'mine.py'}:letters"]}
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"config": config, "output": str(tmp_path), "moments": moments}))
    command = [sys.executable, "-m", "tests.helpers.killed_policy", str(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(moments)
    assert [each for each in found if each["differs"] or each["status"]] == [], done.stderr[-4000:]
    print(*found, sep="\n")
    assert {each["phase"] for each in found} >= {"rollout", "save"}
    assert any(each["from"] for each in found)
