"""Planned and measured peak memory of full fine-tuning, by optimizer, time of its updates and place of its state.

    python -m benchmarks.plan_optimizers [--model qwen3-0.6b] [--batch 2] [--length 512] [--json FILE]

Each run is `halfbyte train` in bf16 on random weights, with 24-bit master weights. The result is written after each
run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import free_memory, parser_of, write_result
from benchmarks.step_model import MODELS
from benchmarks.through_train import write_inputs

OPTIMIZERS = ("adamw", "adamw_8bit", "lion_8bit")
STEPS = 5


def measure(given: argparse.Namespace, optim: str, in_backward: bool, offload: bool, folder: Path) -> dict[str, Any]:
    """Train a few steps and return the planned and measured bytes of the run."""
    import halfbyte

    out = folder / f"{optim}-{in_backward}-{offload}"
    halfbyte.finetune(
        str(folder / "model"), str(folder / "rows.jsonl"), output_dir=str(out), use_peft=False, load_in_4bit=False,
        dtype="bfloat16", optim=optim, optim_args={"rounding": "correction8"}, optim_in_backward=in_backward,
        optim_offload=offload, max_length=given.length, per_device_train_batch_size=given.batch, max_steps=STEPS,
        learning_rate=1e-5, max_grad_norm=0.0, save_steps=1000, sample_prompts=0, eval_split_size=0,
    )  # fmt: skip
    memory = json.loads((out / "memory.json").read_text())
    planned, measured = memory["predicted"]["total"], memory["measured"]["run_bytes"]
    return {"planned": planned, "measured": measured, "ratio": planned / measured}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    made.add_argument("--batch", type=int, default=2)
    made.add_argument("--length", type=int, default=512)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    given.steps, given.accumulate = STEPS, 1
    result: dict[str, Any] = {key: getattr(given, key) for key in ("model", "batch", "length")} | {"runs": {}}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_inputs(given, folder)
        for optim, in_backward, offload in itertools.product(OPTIMIZERS, (False, True), (False, True)):
            free_memory()
            run = measure(given, optim, in_backward, offload, folder)
            name = f"{optim}{', in the backward' * in_backward}{', in host memory' * offload}"
            result["runs"][name] = run
            gib = [run[key] / 2**30 for key in ("planned", "measured")]
            print(f"  {name:44} planned {gib[0]:5.2f} GiB, measured {gib[1]:5.2f}, ratio {run['ratio']:.3f}")
            write_result(given.json, result)


if __name__ == "__main__":
    main()
