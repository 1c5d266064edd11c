"""`halfbyte train` compared with its bare step as one CUDA graph: the cost of the loop, the data and the records.

    python -m benchmarks.through_train [--model qwen3-0.6b] [--batch 2] [--length 512] [--accumulate 1] [--json FILE]

NF4 with nested scales, rank 16 on the seven linears, random weights, clipping to 1.0. The bare step has the same shape
and optimizer, and is one graph of all its micro-batches, the gradient norm and the optimizer; it has no data, records
or schedule. `halfbyte train` is timed on the device, from the end of a step to the end of the next. The host is idle
while it waits for the device: for an event, or to launch a graph whose last replay still runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.harness import free_memory, parser_of, write_result
from benchmarks.step_model import MODELS, RANK, STEPS, build, model_config, random_batch, timed

WARMUP = 8  # steps before the median: compilation and capture
MOST = 1.0  # max_grad_norm


def bare(given: argparse.Namespace) -> dict[str, Any]:
    """Time the whole step as one CUDA graph."""
    import halfbyte
    from halfbyte.modeling.head import causal_lm_loss
    from halfbyte.optim.fused import AdamW
    from halfbyte.train.graph import GraphedStep

    model = build(given.model, "cuda", "nf4")
    halfbyte.patch(model)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)
    rows = given.batch * given.accumulate
    batch = random_batch(given.model, rows, given.length, "cuda")

    def step(batch: Any) -> Tensor:
        total = torch.zeros((), device="cuda")
        for first in range(0, rows, given.batch):
            own = {key: value[first : first + given.batch] for key, value in batch.items()}
            loss_sum, tokens = causal_lm_loss(model, own)
            loss = loss_sum / (tokens * given.accumulate)
            loss.backward()
            total += loss.detach()
        optimizer.clip(MOST)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    graphed = GraphedStep(step, optimizer)
    return timed(lambda: graphed(batch), rows * given.length, given.steps)


def write_inputs(given: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write a checkpoint of random weights with a small tokenizer, and rows of at least `length` tokens."""
    from transformers import AutoModelForCausalLM

    from halfbyte.demo import base, corpus

    model, data = folder / "model", folder / "rows.jsonl"
    base.build_tokenizer(corpus.gather(), base.Recipe()).save_pretrained(model)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(model_config(given.model), dtype=torch.bfloat16)
    made.save_pretrained(model)
    words = [chr(97 + i) for i in range(26)]
    source = random.Random(0)
    count = (WARMUP + given.steps + 1) * given.batch * given.accumulate
    lines = (json.dumps({"text": " ".join(source.choices(words, k=given.length))}) for _ in range(count))
    data.write_text("\n".join(lines) + "\n")
    return model, data


def through_train(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, and read the run's own records."""
    import halfbyte
    from halfbyte.train import metrics_log

    model, data = write_inputs(given, folder)
    free_memory()
    waits: list[tuple[float, float]] = []  # seconds, and the time at their end

    def timed(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed_call(instance: Any) -> None:
            began = time.time()
            call(instance)
            waits.append((time.time() - began, time.time()))

        return timed_call

    with (
        mock.patch.multiple(metrics_log.TimeMark, wait=timed(metrics_log.TimeMark.wait)),
        mock.patch.multiple(torch.cuda.CUDAGraph, replay=timed(torch.cuda.CUDAGraph.replay)),
    ):
        halfbyte.finetune(
            str(model), str(data), output_dir=str(folder / "run"), r=RANK, max_length=given.length,
            per_device_train_batch_size=given.batch, gradient_accumulation_steps=given.accumulate, optim=given.optim,
            max_steps=WARMUP + given.steps, logging_steps=1, max_grad_norm=MOST, save_steps=1000, sample_prompts=0,
            eval_split_size=0, activation_checkpointing=False,
        )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row["kind"] == "train"][WARMUP:-1]  # the last step saves a checkpoint
    milliseconds = 1e3 * statistics.median(after - before for before, after in itertools.pairwise(times))
    idle = sum(seconds for seconds, end in waits if times[0] < end <= times[-1]) / (times[-1] - times[0])
    return {
        "ms": milliseconds,
        "tokens_per_second": given.batch * given.accumulate * given.length / milliseconds * 1e3,
        "host_idle": idle,
        "peak_gib": json.loads((folder / "run" / "memory.json").read_text())["measured"]["peak_bytes"] / 2**30,
        "notices": json.loads((folder / "run" / "environment.json").read_text())["notices"],
    }


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    made.add_argument("--batch", type=int, default=2)
    made.add_argument("--length", type=int, default=512)
    made.add_argument("--accumulate", type=int, default=1)
    made.add_argument("--optim", default="adamw")
    made.add_argument("--steps", type=int, default=3 * STEPS)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    runs = {"bare graph": bare(given)}
    free_memory()
    with tempfile.TemporaryDirectory() as folder:
        runs["halfbyte train"] = through_train(given, Path(folder))
    for name, run in runs.items():
        idle = f"  host idle {run['host_idle']:.0%}" if "host_idle" in run else ""
        print(f"  {name:16} {run['ms']:8.2f} ms  {run['peak_gib']:5.2f} GiB{idle}")
    keys = ["model", "batch", "length", "accumulate", "optim"]
    write_result(given.json, {key: getattr(given, key) for key in keys} | {"runs": runs})


if __name__ == "__main__":
    main()
