"""What a run without trouble prints before its first step: at most 12 lines, for each method."""

import io
import json
import shutil
from pathlib import Path

import pytest

from halfbyte.config import load_config
from halfbyte.config.methods import DEFAULTS
from halfbyte.config.policy import DISTILLING, POLICY, SAMPLING
from halfbyte.report.terminal import LiveMetrics
from halfbyte.train.run import train
from halfbyte.utils.console import Console
from halfbyte.utils.notices import reset_notices
from tests.helpers.run_inputs import VOCABULARY, write_model
from tests.helpers.task_runs import TASKS, rows_of
from tests.helpers.tiny_runs import tiny_llama

MOST = 12
ANSWERS = {
    "sft": {"completion": "it is one"},
    "prm": {"completions": ["one is", "two"], "labels": [True, False]},
    "kto": {"completion": "it is one"},
} | {method: {} for method in SAMPLING}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"


class Begun(BaseException):
    """The first step is recorded."""


def stop_at_first_step(self, record):
    if record["kind"] == "train":
        raise Begun


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("model"), tiny_llama(vocab_size=VOCABULARY))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


@pytest.mark.sampled(20)
@pytest.mark.parametrize("method", ["sft", *DEFAULTS])
def test_few_lines_before_the_first_step(method, model, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("model").symlink_to(model)
    shutil.copytree(model, "teacher")
    config = json.loads(Path("teacher/config.json").read_text())
    Path("teacher/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    answer = ANSWERS.get(method, {"chosen": "one", "rejected": "two"})
    rows = [{"prompt": f"what is {n}", **answer} | ({"label": n % 2 > 0} if method == "kto" else {}) for n in range(24)]
    rows = rows_of(method, 24) if method in TASKS else rows
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"model_name_or_path": "model", "dataset": "data.jsonl", "output_dir": "out", "method": method}
    keys |= {"eval_split_size": 8, "max_length": 64, "sample_max_new_tokens": 1, "device": "cpu"}
    keys |= {"max_completion_length": 2, "gradient_accumulation_steps": 8} if method in SAMPLING else {}
    keys |= {"reward_funcs": ["repetition"]} if method in POLICY else {}
    keys |= {"teacher_model_name_or_path": "teacher"} if method in DISTILLING else {}
    monkeypatch.setattr(LiveMetrics, "update", stop_at_first_step)
    reset_notices()
    screen = io.StringIO()
    with pytest.raises(Begun):
        train(load_config(None, keys), console=Console(file=screen, width=80))
    shown = [*screen.getvalue().splitlines(), *caplog.messages]
    evaluation = 1  # line of the evaluation before training, which `update` prints
    assert len(shown) + evaluation <= MOST, "\n".join(shown)
