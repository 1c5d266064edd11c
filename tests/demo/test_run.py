"""The demo end to end with a base of a few steps, and its checks of output folders."""

import io
import json

import pytest
from rich.console import Console

from halfbyte.config import load_config
from halfbyte.demo import corpus, run
from halfbyte.utils.errors import ConfigError
from tests.helpers.demo_tiny import TEXTS, TINY


@pytest.fixture
def console(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "gather", lambda seed: TEXTS)
    return Console(file=io.StringIO(), width=120)


@pytest.mark.slow
def test_the_demo_leaves_a_run_and_prints_answers(tmp_path, console, monkeypatch):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(run.INSTRUCTIONS.read_text(encoding="utf-8").splitlines()[:40]) + "\n", encoding="utf-8")
    monkeypatch.setattr(run, "INSTRUCTIONS", few)
    report = run.main(tmp_path / "out", recipe=TINY, epochs=1, console=console)
    assert report.read_text(encoding="utf-8").startswith("<!")
    said = console.file.getvalue()
    losses = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    before = next(record["loss"] for record in losses if record["kind"] == "eval")
    assert f"{before:.3f} before" in said
    answers = json.loads((tmp_path / "out" / "generations.json").read_text())
    assert answers
    assert all(run.question(answer["prompt"]) in few.read_text(encoding="utf-8") for answer in answers)
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    # once more into the same folder: an earlier demo makes room
    run.main(tmp_path / "out", recipe=TINY, epochs=1, console=console)


def test_the_written_run_is_a_valid_configuration(tmp_path):
    config = load_config(run.write_run(tmp_path / "out dir", tmp_path / "a: base", epochs=3))
    assert config.model_name_or_path == str(tmp_path / "a: base")
    assert config.output_dir == str(tmp_path / "out dir")
    assert (config.load_in_4bit, config.bnb_4bit_use_double_quant, config.r, config.packing) == (True, True, 16, True)
    assert config.num_train_epochs == 3
    assert len((tmp_path / "out dir" / "instructions.jsonl").read_text(encoding="utf-8").splitlines()) > 300


def test_other_folders_are_not_overwritten(tmp_path, console):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"output_dir.*not"):
        run.main(tmp_path, recipe=TINY, console=console)
    (tmp_path / "run.yaml").write_text("model_name_or_path: mine\n")
    with pytest.raises(ConfigError):
        run.main(tmp_path, recipe=TINY, console=console)
    assert (tmp_path / "thesis.txt").read_text() == "precious"
    assert not (tmp_path / "cache").exists()


def test_questions_are_shown_without_the_chat_format():
    assert run.question("<|im_start|>user\nWhat is len for?<|im_end|>\n<|im_start|>assistant\n") == "What is len for?"
    assert run.question("What is len for?") == "What is len for?"
