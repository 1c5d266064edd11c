"""The CPU benchmarks compare like with like: one list of settings, one clock, and a CPU that is named."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cpu_step, decode
from benchmarks.common import cpu_name


@pytest.mark.parametrize(
    "given", [[], ["--packed", "--dtype", "bfloat16"], ["--checkpointing", "--steps", "5"], ["--experts", "eager"]]
)
def test_both_sides_train_with_the_same_settings(tmp_path, monkeypatch, given):
    """Stock TRL in fp32, padded and checkpointed stood beside halfbyte in bf16, packed and not checkpointed."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    command = ["cpu_step", "--data", str(data), "--model", "m", "--work", str(tmp_path), *given]
    commands = []

    def run(command, check, env):
        commands.append(command)
        name = command[command.index("--only") + 1]
        (tmp_path / f"{name}.json").write_text(
            json.dumps({key: {"stock": 2.0, "ours": 3.0}[name] for key in ("second", "CPU second")})
        )

    monkeypatch.setattr(cpu_step, "mixture", lambda source, folder: None)
    monkeypatch.setattr(cpu_step, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(tmp_path / "result.json")])
    cpu_step.main()
    stock, ours = ([word for word in words if word not in ("stock", "ours")] for words in commands)
    assert stock == ours

    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # other tests of this process keep theirs
    used = []
    for name in ("stock", "ours"):
        monkeypatch.setattr(
            cpu_step, name, lambda model, data, settings, work: used.append((model, data, settings)) or 1
        )
    for words in commands:
        monkeypatch.setattr(sys, "argv", words[2:])
        cpu_step.main()
    assert used[0] == used[1]
    result = json.loads((tmp_path / "result.json").read_text())
    assert cpu_step.Settings(**result["settings"]) == used[0][2]
    assert result["device"] == cpu_name()
    assert result["ratio"] == {"second": 1.5, "CPU second": 1.5}
    assert used[0][2].packed == ("--packed" in given)
    assert used[0][2].checkpointing == ("--checkpointing" in given)


def test_the_prompt_is_taken_off_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    counts = []

    def generate(count):
        counts.append(count)
        now[0] += 100.0 + count

    assert decode.without_prompt(generate, batch=3, new=65) == pytest.approx(3.0)
    assert counts == [4, 65, 1]
