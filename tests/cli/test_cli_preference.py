"""Preference training on the command line: what `init` writes, and what `preview` and `check` show."""

import json

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.cli.init import SHOWN_KEYS, starting_config
from halfbyte.config import load_config
from halfbyte.config.methods import DEFAULTS

PAIRS = [
    {"prompt": f"what is {n}?", "chosen": "a number. " * n, "rejected": "a word. " * (41 - n)} for n in range(1, 41)
]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "simpo"])
def test_init_writes_a_file_for_another_method(method, shared, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    text = starting_config(str(shared / "models/llama-40m"), str(tmp_path / "data.jsonl"), method)
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    assert (config.method, config.learning_rate, config.beta) == (method, 1e-5, 0.1)
    written = [line.split(":")[0] for line in text.splitlines() if not line.startswith("#")]
    assert set(written) == {*SHOWN_KEYS, "method", *DEFAULTS[method]}
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == 8
    assert config.max_length < 512  # a prompt with one answer fills it


def test_preview_shows_a_prompt_once(shared, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "chosen": "two", "rejected": "three"}) + "\n")
    words = ["preview", str(shared / "models/llama-40m"), str(tmp_path / "data.jsonl"), "method=dpo"]
    shown = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert shown.count("1 + 1?") == 1
    assert "⟦two⟧" in shown
    assert "⟦three⟧" in shown


def test_check_says_rows_and_lengths_of_pairs(shared, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = ["check", str(shared / "models/llama-40m"), str(tmp_path / "data.jsonl"), "method=dpo", "device=cpu"]
    shown = " ".join(CliRunner().invoke(app, words, catch_exceptions=False).output.split())
    assert "40 pairs · mean tokens: prompt " in shown
    assert "ready: `halfbyte train` can start" in shown
