"""What kernels bring that may go: steps and tokens with and without each of them, in one process.

python -m benchmarks.deletions [--seconds 95] [--json FILE]

At the shapes of an 8B Llama, with four of its layers for steps of 4×2048 tokens and eight for decoding: a saving of a
layer's kernel counts for 32 / 4 or 32 / 8 as many layers, the head's for one. What brings less than 2% of a step or
token and nothing else should go. Sections stop when the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import step_model
from benchmarks.common import event_us, write_result
from benchmarks.step import Training
from halfbyte.dispatch import Op

LAYERS, DECODED = 4, 8
family, keys = step_model.MODELS["llama-3.1-8b"]
step_model.MODELS["8b-step"] = (family, {**keys, "num_hidden_layers": LAYERS})
step_model.MODELS["8b-token"] = (family, {**keys, "num_hidden_layers": DECODED})


@contextlib.contextmanager
def without(*kernels: tuple[Op, Callable[..., Any]]) -> Iterator[None]:
    """Dispatch as if these kernels of ops were not there."""
    before = [(op, op._added["cuda"]) for op, _ in kernels]
    for op, function in kernels:
        op._added["cuda"] = [row for row in op._added["cuda"] if row.function is not function]
        op._by_device.clear()
    try:
        yield
    finally:
        for op, rows in before:
            op._added["cuda"] = rows
            op._by_device.clear()


def step_ms(training: Training, steps: int = 5) -> list[float]:
    for _ in range(2):
        training.step(training.batch)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        training.step(training.batch)
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def compared(training: Training, *kernels: tuple[Op, Callable[..., Any]], rounds: int = 3) -> dict[str, float]:
    """Median ms of a step with and without kernels, by turns."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        times["with"] += step_ms(training)
        with without(*kernels):
            times["without"] += step_ms(training)
    found = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    return found | {"saved_ms": found["without_ms"] - found["with_ms"]}


def lora_glu_kernels() -> list[tuple[Op, Callable[..., Any]]]:
    from halfbyte.kernels.cuda import lora_glu as kernels
    from halfbyte.ops import lora_glu as ops

    named = [op for op in vars(ops).values() if isinstance(op, Op) and op._added.get("cuda")]
    rows = [(op, row.function) for op in named for row in op._added["cuda"]]
    return [(op, function) for op, function in rows if function.__module__ == kernels.__name__]


def steps() -> Iterator[tuple[str, dict[str, float]]]:
    from halfbyte.kernels.cuda import bitplane, cross_entropy, fp8_product
    from halfbyte.ops.bitplane import dequantize_bitplane
    from halfbyte.ops.cross_entropy import cross_entropy_
    from halfbyte.ops.fp8_product import fp8_product as product

    def on(op: Op, module: Any) -> tuple[Op, Callable[..., Any]]:
        """The first of the module's kernels of the op."""
        rows = op._added["cuda"]
        return op, next(row.function for row in rows if row.function.__module__ == module.__name__)

    training = Training("8b-step", 4, 2048, "cuda")
    training.step(training.batch)  # which imports kernels
    yield "cross-entropy, bf16 step", compared(training, on(cross_entropy_, cross_entropy))
    yield "gated unit, bf16 step", compared(training, *lora_glu_kernels())
    training = Training("8b-step", 4, 2048, "cuda", recipe="fp8-hybrid")
    training.step(training.batch)
    yield "FP8 products with a term by cuBLASLt, fp8-hybrid step", compared(training, on(product, fp8_product))
    yield "gated unit, fp8-hybrid step", compared(training, *lora_glu_kernels(), rounds=2)
    training = Training("8b-step", 4, 2048, "cuda", storage="kbit4")
    training.step(training.batch)
    yield "bit planes to 16 bits, kbit4 step", compared(training, on(dequantize_bitplane, bitplane))


def tokens() -> Iterator[tuple[str, dict[str, float]]]:
    """A token's step of rows, in a graph: all layers in one launch, and as kernels of their own."""
    from halfbyte.generation.engine import StaticEngine
    from halfbyte.ops.decode_layers import one_launch

    model = step_model.build("8b-token", "cuda").eval()
    for batch in (2, 8, 4, 1):
        for adapter in (None, "default"):
            found = {}
            for name in ("one launch", "separate"):
                hidden = [(one_launch, row.function) for row in one_launch._added.get("cuda", ())]
                with without(*hidden) if name == "separate" else contextlib.nullcontext(), torch.inference_mode():
                    engine = StaticEngine(model, [adapter] * batch, 384, None)
                    engine.slot.fill_(128)
                    given = torch.randint(3, 1000, (batch,), device="cuda")
                    for _ in range(4):
                        engine.step(given)
                    found[f"{name}_us"] = event_us([lambda engine=engine, given=given: engine.step(given)], 40, 5)
            yield f"decoding {batch} rows, {adapter or 'no'} adapter", found


def head() -> Iterator[tuple[str, dict[str, float]]]:
    """A chunk's cross-entropy alone, at an even and at an odd vocabulary."""
    from halfbyte.ops.cross_entropy import Objective, cross_entropy_

    for rows, vocabulary in ((512, 128256), (1280, 50257)):
        wide = torch.randn(rows, -(-vocabulary // 16) * 16, device="cuda").bfloat16()
        labels = torch.randint(vocabulary, (rows,), device="cuda")
        copies = [wide.clone()[:, :vocabulary] for _ in range(3)]
        calls = [lambda c=c, labels=labels: cross_entropy_(c, labels, Objective(), True, False) for c in copies]
        found = {"cuda_us": event_us(calls, 30)}
        own = [(cross_entropy_, cross_entropy_._added["cuda"][0].function)]  # of rank 1: Triton's comes after it
        with without(*own):
            found["triton_us"] = event_us(calls, 30)
        yield f"cross-entropy of {rows} rows of {vocabulary}", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--json")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    end = time.monotonic() + given.seconds
    for section in (head, steps, tokens):
        for name, found in section():
            result[name] = found
            print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
            write_result(given.json, result)
            if time.monotonic() > end:
                return
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
