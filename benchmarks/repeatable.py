"""Runs with one seed through `halfbyte train`: are their losses and their adapters equal, bit by bit?

    python -m benchmarks.repeatable --data gsm8k.jsonl --tokenizer llama3/ [--model llama-3.1-8b] [--batch 4]
        [--length 2048] [--steps 300] [--runs 2] [--at-once] [--work DIR] [--json FILE] [KEY=VALUE ...]

Weights are random, rows packed, dropout 0.05. Each run is a process of its own; `--at-once` lets them share the GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import write_result
from benchmarks.step_model import MODELS
from benchmarks.through_train import write_checkpoint


def start(given: argparse.Namespace, number: int) -> subprocess.Popen[str]:
    keys = {
        "output_dir": given.work / f"run{number}", "packing": "true", "max_length": given.length, "lora_dropout": 0.05,
        "per_device_train_batch_size": given.batch, "max_steps": given.steps, "logging_steps": 1, "seed": 0,
        "sample_prompts": 0, "eval_split_size": 0, "save_steps": 100000,
    }  # fmt: skip
    written = [f"{name}={value}" for name, value in keys.items()] + given.keys
    command = [sys.executable, "-m", "halfbyte", "train", str(given.work / "model"), given.data, *written]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ended(given: argparse.Namespace, number: int, run: subprocess.Popen[str]) -> dict[str, Any]:
    said = run.communicate()[1]
    if run.returncode:
        raise SystemExit(f"run {number}: exit {run.returncode}\n{said}")
    folder = given.work / f"run{number}"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    found = {
        "steps": len(losses),
        "losses": hashlib.sha256(json.dumps(losses).encode()).hexdigest()[:16],
        "adapter": hashlib.sha256(adapter).hexdigest()[:16],
        "last_loss": losses[-1],
        "notices": json.loads((folder / "environment.json").read_text())["notices"],
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("/tmp/repeatable"))
    parser.add_argument("--json")
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args()
    write_checkpoint(given.model, given.tokenizer, given.work / "model")
    if given.at_once:
        running = [start(given, number) for number in range(given.runs)]
        runs = [ended(given, number, run) for number, run in enumerate(running)]
    else:
        runs = [ended(given, number, start(given, number)) for number in range(given.runs)]
    equal = all(run[what] == runs[0][what] for run in runs for what in ("losses", "adapter"))
    shape = {name: getattr(given, name) for name in ("model", "batch", "length", "steps")}
    print("equal" if equal else "NOT EQUAL", flush=True)
    write_result(given.json, {**shape, "equal": equal, "runs": runs})


if __name__ == "__main__":
    main()
