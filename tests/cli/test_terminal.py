"""The terminal's words and bars: numbers as given, cells that add up, advice that names one key."""

import io
import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from halfbyte.config import RunConfig
from halfbyte.methods import METHODS
from halfbyte.plan.advice import advise_out_of_memory
from halfbyte.report import terminal
from halfbyte.report.terminal import LiveMetrics, bar_widths
from halfbyte.utils.text import duration, size

GIB = 2**30
PLAN = {
    "weights": 4 * GIB,
    "adapters": GIB // 8,
    "gradients": GIB // 8,
    "optimizer": GIB // 4,
    "activations": 2 * GIB,
    "logits": GIB // 2,
    "runtime": GIB // 2,
    "total": 15 * GIB // 2,
    "activation_checkpointing": True,
    "reason": "9.0 GiB without it",
    "capacity_bytes": 10 * GIB,
}
DATA = {
    "documents": 1234,
    "rows": 400,
    "tokens": 100_000,
    "trained_tokens": 43_210,
    "dropped": {"empty": 2, "overlong": 0},
    "truncated": 7,
    "packing_efficiency": 0.9712,
}


def plain(width: int = 100, verbose: bool = True) -> Console:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.verbose = verbose
    return console


def shown(console: Console) -> str:
    return console.file.getvalue()


def config(**keys) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "Qwen/Qwen3-8B", "dataset": "d.jsonl"} | keys)


def train_record(step: int, **keys) -> dict:
    record = {"kind": "train", "step": step, "epoch": step / 10, "time": 1000.0 + step, "loss": 2.0, "grad_norm": 0.5}
    record |= {"learning_rate": 1e-4, "tokens": 500, "trained_tokens": 200, "step_seconds": 1.0}
    return record | {"tokens_per_second": 500.0, "memory_bytes": 6 * GIB} | keys


@pytest.mark.parametrize(
    ("count", "words"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (3 * 2**10, "3.0 KiB"), (2**29, "512 MiB"), (6.25 * GIB, "6.2 GiB")],
)
def test_sizes(count, words):
    assert size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (float("inf"), "–"), (8.24, "8.2 s"), (59.96, "1:00 min"), (187, "3:07 min"), (7387, "2:03:07 h")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=9), st.integers(1, 120))
def test_bar_widths_add_up(values, width):
    cells = bar_widths(values, width)
    assert sum(cells) == (width if sum(values) > 0 else 0)
    assert all(cell >= 0 for cell in cells)
    total = sum(values)
    assert all(abs(cell - value / total * width) < 1 + 1e-6 for cell, value in zip(cells, values, strict=True) if total)


def test_memory_bar_shows_every_part_and_what_is_free():
    console = plain()
    terminal.print_memory(console, PLAN, {"base_bytes": GIB // 2, "after_load_bytes": 5 * GIB, "peak_bytes": 9 * GIB})
    predicted, measured = re.findall(r"(?:memory|measured) +(\S+)", shown(console))[:2]
    assert len(predicted) == len(measured) == 72
    cells = 72 / 10.5  # of the process's half a GiB, and the 10 that were free then
    assert abs(predicted.count("w") - 4 * cells) <= 1.5
    assert abs(predicted.count("░") - 2.5 * cells) <= 1.5
    assert abs(measured.count("L") - 4.5 * cells) <= 1.5
    assert predicted.count("p") == measured.count("p") > 0  # like with like
    assert "activations 2.0 GiB" in shown(console)
    assert "free 2.5 GiB" in shown(console)
    assert "measured 8.5 GiB" in shown(console)  # what the run added


def test_the_heap_of_a_cpu_process_is_named_as_the_reason_of_a_higher_peak():
    plan, measured = {**PLAN, "device": "cpu"}, {"peak_bytes": int(1.4 * PLAN["total"])}
    for flat, kept in ((plan, True), (PLAN | {"device": "cuda:0"}, False)):
        console = plain()
        terminal.print_memory(console, flat, measured)
        assert "40.0% above" in shown(console)
        assert ("C library" in " ".join(shown(console).split())) == kept


def test_the_reserve_outside_cuda_graphs_is_not_compared_with_the_peak():
    """torch's allocator does not count what a pool of graphs leaves unused."""
    console = plain()
    graphs = {**PLAN, "graphs": 2 * GIB, "total": PLAN["total"] + 2 * GIB}
    assert terminal.comparable_bytes(graphs, {"peak_bytes": 8 * GIB}) == (PLAN["total"], 8 * GIB)
    terminal.print_memory(console, graphs, {"peak_bytes": 8 * GIB})
    assert "CUDA graphs 2.0 GiB" in shown(console)
    assert "measured 8.0 GiB, 6.7%" in shown(console)


def test_memory_is_one_line_unless_the_console_is_verbose():
    for measured in (None, {"base_bytes": GIB // 2, "after_load_bytes": 5 * GIB, "peak_bytes": 9 * GIB}):
        console = plain(verbose=False)
        terminal.print_memory(console, PLAN, measured)
        assert len(shown(console).splitlines()) == 1
        assert terminal.size(9 * GIB - GIB // 2 if measured else PLAN["total"]) in shown(console)


def test_a_plan_prints_from_a_dataclass_a_dict_and_memory_json():
    @dataclass
    class Plan:
        weights: int = 4 * GIB
        total: int = 5 * GIB
        reason: str = "fits"

    nested = {"device": "cpu", "capacity_bytes": 8 * GIB, "predicted": {"weights": 4 * GIB, "total": 5 * GIB}}
    for plan in (Plan(), {"weights": 4 * GIB, "total": 5 * GIB}, nested):
        console = plain()
        terminal.print_memory(console, plan)
        assert "weights 4.0 GiB" in shown(console)
        assert "predicted 5.0 GiB" in shown(console)


def test_a_plan_of_full_fine_tuning_names_weights_and_no_adapters():
    console = plain()
    terminal.print_memory(console, PLAN | {"trains_all": True, "adapters": GIB})
    legend = shown(console)
    assert "trained weights 1.0 GiB" in legend
    assert "adapters" not in legend


@pytest.mark.parametrize(("trained", "words"), [(True, "EOS trained ✓"), (False, "EOS NOT trained ✗")])
def test_data_line(trained, words):
    console = plain(200)
    terminal.print_data(console, {"train": DATA, "eval": None, "eos_trained": trained})
    line = shown(console)
    for fact in ("1,234 documents in 400 rows", "43.2% trained", "2 dropped (2 empty)", "7 truncated", "packing 97.1%"):
        assert fact in line
    assert words in line
    assert "held out" not in line


def test_data_line_names_pairs_and_answers():
    console, means = plain(200), {"prompt": 280.6, "chosen": 281.1, "rejected": 294.3}
    answers = {"rows": 270, "desirable": 135, "mean_tokens": {"prompt": 249.3, "completion": 274.3}}
    terminal.print_data(
        console, {"train": {**DATA, "rows": 251, "mean_tokens": means, "contradicting": 3}, "eval": {**DATA, **answers}}
    )
    pairs, labelled = shown(console).splitlines()[-2:]
    assert "251 pairs · mean tokens: prompt 281, chosen 281, rejected 294 · 3 contradicting · " in pairs
    assert "270 answers · 135 desirable · mean tokens: prompt 249, completion 274 · " in labelled
    assert "documents" not in shown(console)


def test_live_metrics_print_plain_lines_at_a_sensible_rate():
    console = plain(200)
    evaluation = {"kind": "eval", "step": 0, "loss": 3.0, "perplexity": 20.1, "seconds": 2.0}
    with LiveMetrics(console, 40, METHODS["sft"].numbers, capacity_bytes=8 * GIB) as live:
        live.update(evaluation)
        for step in range(1, 41):
            live.update(train_record(step, time=1000.0 + step))
        live.update(evaluation | {"step": 40, "loss": 1.5})
    lines = shown(console).splitlines()
    assert [re.search(r"step (\d+)", line)[1] for line in lines] == ["0", "1", "11", "21", "31", "40", "40"]
    assert "\x1b" not in shown(console)
    for number in ("loss 2.0000", "grad-norm 0.5", "500 tok/s", "6.0 GiB of 8.0 GiB", "ETA 29.0 s"):
        assert number in lines[2]
    assert "loss 1.5000" in lines[-1]


@pytest.mark.parametrize(("before", "now"), [(1.0, 6.0), (6.0, 1.0)])
def test_remaining_time_follows_the_recent_pace(before, now):
    console = plain(200)
    with LiveMetrics(console, 1000, METHODS["sft"].numbers, every_seconds=0.0) as live:
        for step in range(10, 500, 10):
            live.update(train_record(step, time=1000.0 + step) | {"step_seconds": before})
        for step in range(500, 530, 10):
            live.update(train_record(step, time=1000.0 + step) | {"step_seconds": now})
    assert f"ETA {duration(480 * now)}" in shown(console).splitlines()[-1]


def test_live_metrics_redraw_on_a_terminal():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with LiveMetrics(console, 3, METHODS["sft"].numbers) as live:
        for step in (1, 2, 3):
            live.update(train_record(step, loss=3.0 / step))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(console))
    assert "3/3" in text
    assert "loss 1.0000" in text


def test_a_finished_record_from_json_is_enough():
    console = plain(200)
    record = json.loads(json.dumps(train_record(1, grad_norm=None, memory_bytes=None)))
    LiveMetrics(console, 1, METHODS["sft"].numbers).update(record)
    assert "grad-norm" not in shown(console)


ERROR = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 10 GiB")


@pytest.mark.parametrize(
    ("changes", "keys", "key"),
    [
        ({"activation_checkpointing": False}, {}, "activation_checkpointing: true"),
        ({}, {"per_device_train_batch_size": 4}, "per_device_train_batch_size: 2 with gradient_accumulation_steps: 2"),
        ({}, {"max_length": 4096}, "max_length: 2048"),
        ({"logits": 5 * GIB}, {"per_device_train_batch_size": 3}, "per_device_train_batch_size: 1"),
        ({"optimizer": 5 * GIB}, {"r": 64}, "r: 32"),
        ({"optimizer": 5 * GIB}, {"use_peft": False, "load_in_4bit": False}, "use_peft: true"),
        ({"weights": 8 * GIB}, {"load_in_4bit": False}, "load_in_4bit: true"),
        ({"weights": 10 * GIB}, {}, "model_name_or_path: a smaller model"),
    ],
)
def test_out_of_memory_names_one_key(changes, keys, key):
    advice = advise_out_of_memory(PLAN | changes, ERROR, config(**keys))
    assert "2.00 GiB" in advice
    assert advice.split("change: ")[1].startswith(key)


def test_out_of_memory_without_a_config_and_beside_another_process():
    advice = advise_out_of_memory(PLAN | {"capacity_bytes": 80 * GIB, "weights": 0}, MemoryError())
    assert "per_device_train_batch_size" in advice
