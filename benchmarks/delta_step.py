"""A training step of a hybrid's shape with our gated delta rule and convolution, and with transformers' torch code.

python -m benchmarks.delta_step [--model qwen3.5-9b] [--shapes 1x2048,4x2048] [--checkpointing] [--json FILE]

GPU, without flash-linear-attention, whose kernels both would run. NF4, an adapter of rank 16, whole rows, and packed
ones of four documents; as CUDA graphs, too, where activations are kept.
"""

from __future__ import annotations

import argparse
import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.common import write_result
from benchmarks.step import Training
from benchmarks.step_model import timed
from halfbyte.data.collate import PackedCollator
from halfbyte.modeling import recurrent
from halfbyte.train.graph import GraphedStep

DOCUMENTS = (700, 5, 843)  # tokens; the last one has the rest of its row


@contextmanager
def transformers_own() -> Iterator[None]:
    """Within, whole rows run transformers' convolution and delta rule."""
    ours = recurrent._gated_delta_rule, recurrent._convolve_rows
    recurrent._gated_delta_rule = lambda own, *given, **keys: inspect.unwrap(own)(*given, **keys)
    recurrent._convolve_rows = lambda own, *given, **keys: own(*given, **keys)
    try:
        yield
    finally:
        recurrent._gated_delta_rule, recurrent._convolve_rows = ours


def packed(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    rows = [
        {"input_ids": row, "labels": row, "seq_lengths": [*DOCUMENTS, len(row) - sum(DOCUMENTS)]}
        for row in batch["input_ids"].tolist()
    ]
    found = PackedCollator(0, fused=True)(rows)
    return {key: each.cuda() if torch.is_tensor(each) else each for key, each in found.items()}


def measured(name: str, rows: int, length: int, checkpointing: bool) -> dict[str, Any]:
    training, results = Training(name, rows, length, "cuda", checkpointing=checkpointing), {}

    def put(what: str, step: Callable[[], torch.Tensor]) -> None:
        training.restart()
        gc.collect()
        torch.cuda.empty_cache()
        results[what] = timed(step, rows * length, 4)
        print(f"{rows}x{length} {what}: {results[what]['ms']:.0f} ms, {results[what]['peak_gib']:.1f} GiB", flush=True)

    for kind, batch in (("rows", training.batch), ("packed", packed(training.batch))):
        put(kind, lambda batch=batch: training.step(batch))
        if not checkpointing:
            graphed = GraphedStep(training.step, training.optimizer)
            put(f"{kind}, graph", lambda graphed=graphed, batch=batch: graphed(batch))
            del graphed
    with transformers_own():
        put("rows, transformers", lambda: training.step(training.batch))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-9b")
    parser.add_argument("--shapes", default="1x2048,4x2048")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    result: dict[str, Any] = {"model": given.model, "checkpointing": given.checkpointing}
    for shape in given.shapes.split(","):
        rows, length = map(int, shape.split("x"))
        result[shape] = measured(given.model, rows, length, given.checkpointing)
        write_result(given.json, result)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
