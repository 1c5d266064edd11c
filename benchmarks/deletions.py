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
    for recipe in ("bf16", "fp8-hybrid"):
        training = Training("8b-step", 4, 2048, "cuda", recipe=recipe)
        training.step(training.batch)  # which imports kernels
        yield f"gated unit, {recipe} step", compared(training, *lora_glu_kernels())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--json")
    given = parser.parse_args()
    result: dict[str, Any] = {}
    end = time.monotonic() + given.seconds
    for section in (steps, tokens):
        for name, found in section():
            result[name] = found
            print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
            write_result(given.json, result)
            if time.monotonic() > end:
                return
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
