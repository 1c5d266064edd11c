"""Optimizer steps of this package and of its peers in one process, as a share of a copy of the bytes that they move.

    python -m benchmarks.optim [--elements 1e9] [--only REGEX] [--json FILE]

- `1b`: one fp32 parameter with an fp32 gradient.
- `1b-bf16`: one bf16 parameter with a bf16 gradient, and a master weight of 24 or 32 bits.
- `lora`: the 450 adapter matrices of an 8B model in fp32 (29 M elements), gradients clipped to norm 1, called from
  Python and in a CUDA graph.

Bytes are those that a step must read and write: gradient, weight, correction and state. The result is written after
each figure. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import copy_bandwidth, event_us, free_memory, graph_us, parser_of, write_result
from halfbyte.ops.optimizer_state import STORAGES
from halfbyte.optim.fused import AdamW

PEERS = ("bitsandbytes", "torchao", "flashoptim")
STATES = 2  # of AdamW


def one(elements: int, dtype: torch.dtype) -> list[nn.Parameter]:
    parameter = nn.Parameter(torch.randn(elements, device="cuda").to(dtype))
    parameter.grad = torch.randn(elements, device="cuda").mul_(1e-3).to(dtype)
    return [parameter]


def adapters() -> list[nn.Parameter]:
    """The LoRA matrices of 32 layers of an 8B model at rank 16, and two more: 450 of 29 M elements or so."""
    hidden, inner, rank = 4096, 14336, 11
    sides = [
        (hidden, hidden),
        (hidden, 1024),
        (hidden, 1024),
        (hidden, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]
    shapes = [shape for columns, rows in sides for shape in ((rank, columns), (rows, rank))] * 32 + [(rank, hidden)] * 2
    found = [nn.Parameter(torch.randn(*shape, device="cuda")) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def step_bytes(parameters: list[nn.Parameter], state: float, correction: int = 0) -> float:
    """Bytes of a step: the gradient once, weight, correction and state of `state` bytes per element twice."""
    elements = sum(parameter.numel() for parameter in parameters)
    return elements * (3 * parameters[0].element_size() + 2 * (correction + state))


def ours(storage: str, rounding: str = "nearest") -> Callable[[list[nn.Parameter]], Callable[[], Any]]:
    return lambda parameters: AdamW(parameters, 1e-3, storage=storage, rounding=rounding).step


def peers(bf16: bool) -> Iterator[tuple[str, float, int, Callable[[list[nn.Parameter]], Callable[[], Any]]]]:
    """Name, bytes of state per element, bytes of correction, and parameters → a step."""
    if not bf16:
        yield "torch fused 32-bit", 8, 0, lambda p: torch.optim.AdamW(p, 1e-3, fused=True).step
    if installed("bitsandbytes") and not bf16:
        import bitsandbytes as bnb

        yield "bitsandbytes 8-bit", 2 + 8 / 256, 0, lambda p: bnb.optim.AdamW8bit(p, 1e-3).step
        yield "bitsandbytes paged 8-bit", 2 + 8 / 256, 0, lambda p: bnb.optim.PagedAdamW8bit(p, 1e-3).step
    if installed("torchao"):
        from torchao.optim import AdamW8bit

        yield "torchao 8-bit", 2 + 8 / 256, 0, lambda p: AdamW8bit(p, 1e-3, bf16_stochastic_round=bf16).step
    if installed("flashoptim") and bf16:
        from flashoptim import FlashAdamW

        yield "flashoptim 24-bit", 2 + 4 / 32, 1, lambda p: FlashAdamW(p, 1e-3, master_weight_bits=24).step


def installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def one_parameter(elements: int, dtype: torch.dtype, keep: re.Pattern[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    bf16 = dtype == torch.bfloat16
    roundings = ("correction8", "correction16", "stochastic") if bf16 else ("nearest",)
    rows = [
        (
            f"halfbyte {storage} {rounding}",
            STATES * STORAGES[storage].nbytes(2**20) / 2**20,
            size,
            ours(storage, rounding),
        )
        for storage in STORAGES
        for rounding, size in zip(roundings, (1, 2, 0) if bf16 else (0,), strict=True)
    ]
    for name, state, correction, make in [*rows, *peers(bf16)]:
        if not keep.search(name):
            continue
        try:
            parameters = one(elements, dtype)
            before = torch.cuda.memory_allocated()
            step = make(parameters)
            step()
            held = (torch.cuda.memory_allocated() - before) / elements
            moved = step_bytes(parameters, state, correction)
            us = event_us([step], 8, 2)
            yield name, {"ms": us / 1e3, "TB/s": moved / us / 1e6, "bytes": moved, "state bytes per element": held}
        except Exception as error:  # a peer's, which other rows do not need
            yield name, {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        parameters = step = None  # type: ignore[assignment]
        free_memory()


def lora(keep: re.Pattern[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    def clipped(parameters: list[nn.Parameter], optimizer: Any) -> Callable[[], Any]:
        def step() -> Tensor:
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            return norm

        return step

    def own(storage: str) -> Callable[[list[nn.Parameter]], Callable[[], Any]]:
        def make(parameters: list[nn.Parameter]) -> Callable[[], Any]:
            optimizer = AdamW(parameters, 1e-3, storage=storage)

            def step() -> None:
                optimizer.clip(1.0)
                optimizer.step()

            return step

        return make

    rows: list[tuple[str, bool, Callable[[list[nn.Parameter]], Callable[[], Any]]]] = [
        *((f"halfbyte {storage}", True, own(storage)) for storage in STORAGES),
        ("torch fused 32-bit", True, lambda p: clipped(p, torch.optim.AdamW(p, 1e-3, fused=True, capturable=True))),
    ]
    if installed("bitsandbytes"):
        import bitsandbytes as bnb

        rows.append(("bitsandbytes 8-bit", False, lambda p: clipped(p, bnb.optim.AdamW8bit(p, 1e-3))))
    for name, captured, make in rows:
        if not keep.search(name):
            continue
        parameters = adapters()
        step = make(parameters)
        row = {"called ms": event_us([step], 20, 4) / 1e3}
        if captured:
            row["graph ms"] = graph_us([step]) / 1e3
        yield name, row
        parameters = step = None  # type: ignore[assignment]
        free_memory()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    keep, elements = re.compile(arguments.only), int(arguments.elements)
    versions = {name: metadata.version(name) for name in PEERS if installed(name) and name != "flashoptim"}
    result: dict[str, Any] = {"copy TB/s": copy_bandwidth(), "peers": versions, "elements": elements}
    free_memory()
    parts = {
        "lora": lora(keep),
        "1b": one_parameter(elements, torch.float32, keep),
        "1b-bf16": one_parameter(elements, torch.bfloat16, keep),
    }
    for part, rows in parts.items():
        result[part] = {}
        for name, row in rows:
            if "TB/s" in row:
                row["share of a copy"] = row["TB/s"] / result["copy TB/s"]
            result[part][name] = row
            print(
                part,
                name,
                {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                flush=True,
            )
            write_result(arguments.json, result)
    return result


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--elements", type=float, default=1e9)
    made.add_argument("--only", default="", help="regular expression of rows")
    return made


def main(words: Sequence[str] | None = None) -> None:
    run(parser().parse_args(words))


if __name__ == "__main__":
    main()
