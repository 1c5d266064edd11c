"""The report and the card of a made-up run: right numbers, sound HTML, nothing loaded, nothing injected."""

import base64
import itertools
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from halfbyte.config import RunConfig
from halfbyte.report.card import write_card
from halfbyte.report.page import write_report
from halfbyte.report.plots import smooth
from halfbyte.report.run import read_run
from halfbyte.train.result import RunResult
from tests.helpers.board_runs import write_run

ATTACK = '<script>alert("halfbyte")</script>'
GIB = 2**30
QUESTION = ("<|im_start|>", "user", "\n", "What", " is", " 17", " +", " 25", "?", "<|im_end|>", "\n")
ANSWER = ("<|im_start|>", "assistant", "\n", "17", " +", " 25", " is", " **", "42", "**.", "<|im_end|>", "\n")
FILES = (
    "config.resolved.yaml",
    "metrics.jsonl",
    "memory.json",
    "data_report.json",
    "generations.json",
    "environment.json",
    "checks.json",
    "merge.json",
)


def train_record(step: int) -> dict:
    wobble = math.sin(step * 12.9898) * 0.15
    return {
        "kind": "train",
        "step": step,
        "epoch": step / 60,
        "time": 1_750_000_000.0 + step * 0.5,
        "loss": 1.1 + 1.6 * math.exp(-step / 25) + wobble,
        "grad_norm": 0.6 + abs(wobble),
        "learning_rate": 2e-4 * min(step / 6, 0.5 * (1 + math.cos(math.pi * step / 120))),
        "tokens": 4000 + step,
        "trained_tokens": 1500,
        "step_seconds": 3.0 if step == 1 else 0.5 + abs(wobble) / 10,
        "tokens_per_second": (4000 + step) / (3.0 if step == 1 else 0.5 + abs(wobble) / 10),
        "memory_bytes": int(5.9 * GIB),
    }


def eval_record(step: int, loss: float) -> dict:
    record = {"kind": "eval", "step": step, "epoch": step / 60, "time": 1_750_000_000.0 + step * 0.5, "loss": loss}
    return record | {"perplexity": math.exp(loss), "tokens": 51_200, "seconds": 2.5}


def split(documents: int) -> dict:
    return {
        "documents": documents,
        "rows": documents // 3,
        "tokens": documents * 200,
        "trained_tokens": documents * 80,
        "dropped": {"empty": 3, "longer than max_length": 4},
        "truncated": 11,
        "packing_efficiency": 0.973,
        "length_histogram": {
            "edges": list(range(0, 2049, 128)),
            "counts": [9, 60, 140, 180, 150, 99, 70, 52, 33, 20, 12, 8, 5, 3, 2, 1],
        },
    }


def make_run(directory: Path) -> Path:
    """A run directory with every file the report knows."""
    config = RunConfig(
        model_name_or_path="Qwen/Qwen3-8B", dataset="data/support.jsonl", packing=True, learning_rate=1e-4, seed=3407
    )
    (directory / "config.resolved.yaml").write_text(yaml.safe_dump(config.model_dump(), sort_keys=False))
    records = [eval_record(0, 2.6543), *map(train_record, range(1, 61)), eval_record(60, 1.4321)]
    records += [*map(train_record, range(61, 121)), eval_record(120, 1.2345)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    part = {"weights": 4.4, "adapters": 0.16, "gradients": 0.16, "optimizer": 0.32, "activations": 0.7, "logits": 0.3}
    predicted = {name: int(value * GIB) for name, value in part.items()} | {"runtime": int(0.4 * GIB)}
    documents = {
        "memory.json": {
            "device": "cuda:0",
            "capacity_bytes": int(139.8 * GIB),
            "predicted": predicted | {"total": sum(predicted.values())},
            "measured": {
                "base_bytes": int(0.4 * GIB),
                "after_load_bytes": int(4.9 * GIB),
                "peak_bytes": int(6.2 * GIB),
            },
            "activation_checkpointing": True,
            "reason": "2.1 GiB of activations become 0.7 GiB",
        },
        "data_report.json": {
            "sources": [
                {"path": "data/support.jsonl", "format": "messages", "why": "has a messages column", "rows": 904}
            ],
            "template": "the tokenizer's own",
            "mask": "generation marks of the chat template",
            "train": split(897),
            "eval": split(90),
            "eos_trained": True,
            "stop_tokens": ["<|im_end|>"],
            "samples": [
                {"tokens": [*QUESTION, *ANSWER], "trained": [False] * 14 + [True] * 8 + [False]},
                {"tokens": [ATTACK, " ok"], "trained": [False, True]},
            ],
        },
        "generations.json": [
            {
                "prompt": "A shop sells pens at 3 for $2. How much are 12 pens?",
                "before": "The shop sells pens. The shop sells pens. The shop",
                "after": "12 pens are 4 groups of 3.\nEach group costs $2, so 4 × 2 = $8.\n#### 8",
                "reference": "12 / 3 = 4 groups, 4 * 2 = 8\n#### 8",
            },
            {"prompt": ATTACK, "before": ATTACK, "after": "No.", "reference": None},
        ],
        "environment.json": environment_record(),
        "checks.json": {"adapter_reload": {"max_logit_difference": 0.0, "passed": True}},
        "merge.json": {
            "targets": {
                "original": {"kl": 0.00213, "max_logit_difference": 0.41},
                "dequantized": {"kl": 0.0000312, "max_logit_difference": 0.0625},
            },
            "closer": "dequantized",
        },
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))
    return directory


def environment_record() -> dict:
    return {
        "halfbyte": {"version": "0.1.0", "commit": "d1af82e99469"},
        "python": "3.11.7",
        "platform": "Linux-6.8-x86_64",
        "cpu": {
            "model": "Intel Xeon Platinum 8481C",
            "cores": 16,
            "threads": 16,
            "memory_bytes": 128 * GIB,
            "instruction_sets": ["AMX-BF16", "AVX512-BF16", "AVX2"],
        },
        "gpus": [{"name": "NVIDIA H200", "memory_bytes": int(139.8 * GIB), "capability": "9.0", "driver": "570.1"}],
        "versions": {"torch": "2.13.0", "triton": "3.9.0", "transformers": "5.23.0", "trl": None, "cuda": "12.9"},
        "device": "cuda:0",
        "compute_dtype": {"dtype": "bfloat16", "reason": "NVIDIA H200 multiplies bf16 natively"},
        "kernels": {"enabled": True, "reason": "triton 3.9.0 drives cuda"},
        "notices": {"lora_rank": "lora_rank (LLaMA-Factory's name) is read as r", "attack": ATTACK},
        "started": "2026-06-15T15:06:40+00:00",
        "finished": "2026-06-15T15:08:00+00:00",
    }


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order or never, and collects everything a browser would fetch."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        loads = [
            value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "poster", "action")
        ]
        self.loads += [value for value in loads if not value.startswith("#")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check(html: str) -> Balance:
    parser = Balance()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def html(run_dir, drawing) -> str:
    with drawing():
        return write_report(run_dir).read_text()


def test_page_is_balanced_and_self_contained(html):
    page = check(html)
    assert page.loads == []
    assert not page.tags & {"script", "iframe", "link", "img", "object", "embed"}
    assert not re.search(r"url\((?!#)|@import|https?://", html)
    assert html.count("<svg") == 6


def test_pairs_have_facts_of_their_own(tmp_path):
    run = make_run(tmp_path)
    said = json.loads((run / "data_report.json").read_text())
    said["train"] |= {"mean_tokens": {"prompt": 280.61, "chosen": 281.13}, "chosen_longer": 0.39, "contradicting": 4}
    (run / "data_report.json").write_text(json.dumps(said))
    page = write_report(run).read_text()
    for fact in ("mean tokens: chosen", "281.1", "chosen is longer", "39.0%", "contradicting"):
        assert fact in page


def test_page_contains_the_numbers(html, run_dir):
    records = [train_record(step) for step in range(1, 121)]
    final = sum(record["loss"] for record in records[-12:]) / 12  # equal trained tokens: a plain mean
    throughput = sum(record["tokens"] for record in records) / sum(record["step_seconds"] for record in records)
    for number in (
        f"{final:.4f}",
        "1.2345",
        "from 2.6543 at step 0",
        f"{throughput:,.0f} tok/s",
        "6.2 GiB",
        "1:20 min",
    ):
        assert number in html
    for number in (
        "179,400 tokens",
        "40.0%",
        "97.3% full",
        "140 GiB",
        "0.00213",
        "3.12e-05",
        "AMX-BF16",
        "d1af82e99469",
    ):
        assert number in html
    assert re.search(r"onto the dequantized base <span class=\"good\">closer", html)
    assert "EOS trained ✓</span> <code>&lt;|im_end|&gt;</code>" in html


def test_what_users_write_is_escaped(html):
    assert ATTACK not in html
    assert html.count("&lt;script&gt;") >= 4  # a sample token, prompt, answer and notice
    assert "<|im_start|>" not in html


def test_masks_mark_exactly_the_trained_tokens(html):
    sample = re.findall(r'<pre class="tokens">(.*?)</pre>', html, re.DOTALL)[0]
    assert re.findall(r"<b>([^<]*)</b>", sample) == ["17", " +", " 25", " is", " **", "42", "**.", "&lt;|im_end|&gt;"]
    assert len(re.findall(r"<i>", sample)) == 15


def test_peak_memory_compares_like_with_like(html, run_dir):
    """A CPU's peak holds the process; what the run added is what was predicted."""
    assert "9.9% below the predicted 6.4 GiB, in addition to the process&#x27;s 410 MiB" in html
    card = write_card(run_dir).read_text()
    assert "| peak memory of the run | 5.8 GiB, in addition to the process's 410 MiB |" in card


@pytest.mark.parametrize("absent", FILES)
def test_a_missing_file_costs_only_its_section(tmp_path, absent):
    (make_run(tmp_path) / absent).unlink()
    html = write_report(tmp_path).read_text()
    check(html)
    expected = {"metrics.jsonl": "No training steps", "generations.json": "No answers", "merge.json": "Not merged yet"}
    assert expected.get(absent, f"{absent}") in html
    check_card = write_card(tmp_path).read_text()
    assert check_card.startswith("---\n")


def test_an_empty_directory_still_gets_a_report(tmp_path):
    html = write_report(tmp_path).read_text()
    check(html)
    assert html.count('class="missing"') >= 8
    assert write_card(tmp_path).exists()


def test_half_a_line_and_broken_json_are_named(tmp_path):
    make_run(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 121, "lo')
    (tmp_path / "memory.json").write_text('{"device":')
    html = write_report(tmp_path).read_text()
    assert "metrics.jsonl line 124" in html
    assert "memory.json" in html


CHANGED = {  # file → content of another shape, or that cannot be parsed
    "memory.json": '{"measured": {"base_bytes": "x"}}',
    "data_report.json": '{"train": {"tokens": 0}}',
    "generations.json": '["a"]',
    "environment.json": '{"started": "never", "halfbyte": 3}',
    "metrics.jsonl": '{"kind": "train", "step": 1}\n7\n{"kind": "eval", "step": "x"}\n',
    "checks.json": "[" * 10000,
    "merge.json": '{"targets": [1]}',
    "config.resolved.yaml": "a: \x07",
}


@pytest.mark.parametrize(("file", "text"), CHANGED.items(), ids=list(CHANGED))
def test_a_file_that_was_changed_costs_its_own_part_alone(tmp_path, file, text):
    make_run(tmp_path)
    (tmp_path / file).write_text(text)
    html = write_report(tmp_path).read_text()
    check(html)
    assert "cannot be" in html or "No " in html or "unknown" in html


def test_a_resumed_run_counts_repeated_steps_once(tmp_path):
    records = [train_record(step) for step in (1, 2, 3, 2, 3, 4)]
    records[3] |= {"loss": 9.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = read_run(tmp_path)
    assert [record["step"] for record in run.train] == [1, 2, 3, 4]
    assert run.train[1]["loss"] == 9.0


def test_throughput_counts_every_step_of_a_logging_window(tmp_path):
    """With logging_steps 10, a record's tokens are of all ten steps while step_seconds is the mean of one."""
    record = train_record(10) | {"tokens": 40_000, "step_seconds": 0.5, "tokens_per_second": 8000.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert read_run(tmp_path).throughput == pytest.approx(8000.0)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_short_and_nan_runs_draw(tmp_path, count):
    records = [train_record(step) for step in range(1, count + 1)]
    records[-1]["loss"] = math.nan
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    check(write_report(tmp_path).read_text())


def test_card_loads_with_plain_peft(run_dir):
    card = write_card(run_dir).read_text()
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "Qwen/Qwen3-8B"
    assert header["library_name"] == "peft"
    code = re.search(r"```python\n(.*?)\n```", card, re.DOTALL)[1]
    compile(code, "card", "exec")
    assert len(code.splitlines()) == 5
    assert "halfbyte" not in code
    for fact in ("1.2345", "2.6543", "| learning\\_rate | 0.0001 |", "5.8 GiB"):
        assert fact in card


def test_card_shows_images_with_the_answers(run_dir):
    """The card for the hub shows none."""
    url = "data:image/jpeg;base64,/9j/4AAQ"
    records = [{"prompt": "Which | digit?", "before": "3", "after": "7", "images": [url, "javascript:x"]}]
    (run_dir / "generations.json").write_text(json.dumps(records))
    (run_dir / "adapter").mkdir(exist_ok=True)
    card, published = write_card(run_dir).read_text(), (run_dir / "adapter/README.md").read_text()
    (name,) = re.findall(r"!\[image\]\((picture-\w+\.jpg)\)", card)
    assert (run_dir / name).read_bytes() == base64.b64decode("/9j/4AAQ")
    assert "| prompt | Which \\| digit? |\n| before | 3 |\n| after | 7 |" in card
    assert "javascript" not in card
    assert "picture" not in published
    assert "Which" not in published


@pytest.mark.parametrize(
    ("method", "loader", "labels", "pipeline"),
    [
        ("reward", "AutoModelForSequenceClassification", "num_labels=1", "text-classification"),
        ("prm", "AutoModelForTokenClassification", "num_labels=2", "token-classification"),
        ("dpo", "AutoModelForCausalLM", "Qwen3-8B', dtype", "text-generation"),
    ],
)
def test_card_of_another_method(tmp_path, method, loader, labels, pipeline):
    (tmp_path / "config.resolved.yaml").write_text(f"model_name_or_path: Qwen/Qwen3-8B\ndataset: d\nmethod: {method}\n")
    text = write_card(tmp_path).read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["pipeline_tag"] == pipeline
    assert header["tags"][:3] == ["halfbyte", "lora", method]
    code = re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1]
    compile(code, "card", "exec")
    assert f"import {loader}, AutoTokenizer" in code
    assert labels in code


@pytest.mark.parametrize("name", ["base", "base.gguf"])
def test_cards_of_a_local_base(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (tmp_path / name).touch()
    (run / "config.resolved.yaml").write_text(f"model_name_or_path: {name}\ndataset: {tmp_path}/d.jsonl\n")
    (run / "data_report.json").write_text(
        json.dumps({"sources": [{"path": f"{tmp_path}/d.jsonl", "rows": 3, "format": "text"}]})
    )
    mine, published = (write_card(run).read_text(), (run / "adapter/README.md").read_text())
    folder = f"{str(tmp_path)!r}, gguf_file='base.gguf'" if name == "base.gguf" else f"{str(tmp_path / name)!r}"
    assert f"AutoModelForCausalLM.from_pretrained({folder}, dtype" in mine
    assert str(tmp_path) not in published
    assert "base_model" not in published
    assert ("gguf_file='base.gguf'" in published) == (name == "base.gguf")
    for text in (mine, published):
        compile(re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1], "card", "exec")


def test_card_of_full_fine_tuning_and_local_base(tmp_path):
    (tmp_path / "config.resolved.yaml").write_text(
        "model_name_or_path: /data/base\nuse_peft: false\ndataset: d.jsonl\n"
    )
    card = write_card(tmp_path).read_text()
    assert "base_model" not in card
    assert 'AutoModelForCausalLM.from_pretrained("model"' in card
    assert "lora" not in card.lower()


def test_a_notebook_shows_the_headline_figures(tmp_path):
    run = write_run(tmp_path / "run")
    html = RunResult(run, {})._repr_html_()
    assert "Held-out loss" in html
    assert "1.3000" in html
    assert "report.html" in html


def test_smoothing_reaches_the_ends_without_ripples():
    noise = random.Random(0)
    values = [noise.gauss(2, 1) for _ in range(600)]
    values[5], values[300] = math.nan, math.inf
    means = smooth(values)
    weights = [max(0, 40 - distance) * math.isfinite(value) for distance, value in enumerate(values)]
    ahead = sum(weight * value for weight, value in zip(weights, values, strict=True) if weight)
    assert means[0] == pytest.approx(ahead / sum(weights))
    steps = [abs(after - before) for before, after in itertools.pairwise(means)]
    assert max(steps[:80] + steps[-80:]) < 1.5 * max(steps[80:-80])
    assert smooth([3.0] * 50) == pytest.approx([3.0] * 50)
    assert all(map(math.isnan, smooth([math.nan] * 40)))
