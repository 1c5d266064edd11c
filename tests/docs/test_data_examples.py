"""The rows of docs/data.md are prepared as its previews show."""

import json
import re
from pathlib import Path

import pytest

from halfbyte.cli.preview import render, render_answers, render_task
from halfbyte.config import load_config
from halfbyte.methods import METHODS, method_of
from tests.data.conftest import byte_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
EXAMPLE = re.compile(r"^### ([^\n]*)\n(.*?)^```json\n(.*?)^```\n+```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [(title, row, shown) for title, _, row, shown in EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))]
KEYS = {
    "gkd": {"teacher_model_name_or_path": "teacher"},
    "grpo": {"reward_funcs": ["exact"], "per_device_train_batch_size": 8},
    "rloo": {"reward_funcs": ["exact"], "per_device_train_batch_size": 8},
}


def methods_in(title: str) -> list[str]:
    """Return the methods that a heading names; sft if it names none."""
    return [name for name in re.findall(r"`(\w+)`", title) if name in METHODS] or ["sft"]


def preview_of(row: str, method_name: str, folder: Path) -> str:
    """Return the preview of a row without colours."""
    (folder / "row.jsonl").write_text(json.dumps(json.loads(row)))
    keys = {"model_name_or_path": "m", "dataset": str(folder / "row.jsonl"), "method": method_name}
    config, tokenizer = load_config(None, keys | KEYS.get(method_name, {})), byte_tokenizer()
    method = method_of(config)
    prepared, ends = method.prepare(config, tokenizer), {tokenizer.eos_token_id}
    shown = []
    for number, row_of_data in enumerate(prepared.train):
        if method.rows == "text":
            batch = method.collator(config, tokenizer)([row_of_data])
            shown += render(batch, tokenizer, ends, number, marks=True)
        elif method.rows == "labelled":
            shown += render_task(row_of_data, tokenizer, number, marks=True)
        else:
            shown += render_answers(row_of_data, tokenizer, ends, number, marks=True)
    return "\n".join(text.plain.strip("\n") for text in shown)


def comparable(text: str) -> list[str]:
    """Return the lines without the rules of headings and white space at their ends."""
    return [line.rstrip("─ ") for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize(("title", "row", "shown"), EXAMPLES, ids=[title for title, _, _ in EXAMPLES])
def test_a_row_is_prepared_as_its_preview_shows(title, row, shown, tmp_path, monkeypatch):
    # A file with one label only is refused.
    monkeypatch.setattr("halfbyte.data.prepare_answers._check_answers", lambda *arguments: None)
    for name in methods_in(title):
        assert comparable(preview_of(row, name, tmp_path)) == comparable(shown)


def test_every_method_and_format_has_an_example():
    assert {name for title, _, _ in EXAMPLES for name in methods_in(title)} == set(METHODS)
    formats = {"messages", "sharegpt", "prompt-completion", "alpaca", "text"}
    assert formats <= {name for title, _, _ in EXAMPLES for name in re.findall(r"`([\w-]+)`", title)}
