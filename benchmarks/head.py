"""The loss of a frozen head against its two GEMMs, on one CUDA device.

python -m benchmarks.head [--shapes 16384x128256x4096,8192x128256x4096,16384x151936x1024] [--json FILE]
    [--chunks 256,512,1024]

The floor of a shape, tokens × vocabulary × hidden, is X·Wᵀ and dZ·W alone, whole. Every implementation makes the mean
loss and dX from bf16 inputs; they take turns, so that all meet the same clocks. Memory is the peak over the inputs.
Peers: torch with full logits, the same compiled, and Liger where it is on PYTHONPATH. `--chunks` times ours with other
chunks, to see what products lose in smaller ones. The kernel is measured alone on chunks that do not fit the cache
together; its bytes are one read and one write of the logits, so that its two reads from memory can reach 67% of a copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import copy_bandwidth, graph_us, write_result
from halfbyte.autograd.losses import linear_cross_entropy, linear_log_probs
from halfbyte.ops.cross_entropy import Objective, cross_entropy_
from halfbyte.ops.losses import chunk_rows, linear_cross_entropy_forward

SHAPES = "16384x128256x4096,8192x128256x4096,16384x151936x1024"
ROUNDS = 10
GIB = 2**30

Call = Callable[[], Any]


def inputs(tokens: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    return hidden, weight, torch.randint(vocabulary, (tokens,), device="cuda")


def two_gemms(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return (hidden @ weight.T) @ weight


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels, shift=False, reduction="mean")


def ours_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -linear_log_probs(hidden, weight, labels)[0].mean()


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def trained(loss: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and dX."""
    value = loss(hidden, weight, labels)
    return value.detach(), torch.autograd.grad(value, hidden)[0]


def implementations(hidden: Tensor, weight: Tensor, labels: Tensor, chunks: list[int]) -> dict[str, Call]:
    arguments = hidden, weight, labels
    losses: dict[str, Callable[..., Tensor]] = {"halfbyte": ours, "halfbyte log-probs": ours_log_probs}
    losses |= {"torch, full logits": full_logits, "torch.compile": torch.compile(full_logits, fullgraph=True)}
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        losses["liger"] = lambda *arguments: LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]
    calls: dict[str, Call] = {"two GEMMs": partial(two_gemms, *arguments)}
    calls |= {name: partial(trained, loss, *arguments) for name, loss in losses.items()}
    for rows in chunks:
        forward = partial(linear_cross_entropy_forward, hidden.detach(), weight, labels, chunk=rows)
        calls[f"forward, {rows} rows"] = forward
    return calls


def check(calls: dict[str, Call]) -> None:
    """Everyone computes the same: the loss to 1e-3 and dX to 2%, bf16's error at these sums, or nothing is timed."""
    results = {name: call() for name, call in calls.items() if "rows" not in name and name != "two GEMMs"}
    loss, grad = results["torch, full logits"]
    for name, (value, other) in results.items():
        distance = ((other.float() - grad.float()).norm() / grad.float().norm()).item()
        if abs(value.item() / loss.item() - 1) > 1e-3 or not distance < 0.02:
            raise SystemExit(f"{name}: loss {value.item()} for {loss.item()}, dX off by {distance:.2%}; nothing timed")


def peak_bytes(call: Call) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def take_turns(calls: dict[str, Call]) -> dict[str, dict[str, float]]:
    """Median ms of each call and its peak of memory in bytes."""
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: {"ms": statistics.median(times[name]), "peak_bytes": peaks[name]} for name in calls}


def run_kernel(vocabulary: int, copy: float) -> dict[str, float]:
    """The kernel alone, on chunks as the head makes them, replayed from a graph."""
    rows = chunk_rows(vocabulary, "cuda", 2)
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    chunks = [torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    calls = [partial(cross_entropy_, chunk, labels, Objective(), True, False) for chunk in chunks]
    size = 2 * chunks[0].numel() * chunks[0].element_size()
    us = graph_us(calls)
    speed = size / us / 1e6
    return {"rows": rows, "bytes": size, "us": us, "TBps": speed, "fraction_of_copy": speed / copy}


def run_shape(shape: tuple[int, int, int], chunks: list[int], copy: float) -> dict[str, Any]:
    torch._dynamo.reset()
    calls = implementations(*inputs(*shape), chunks)
    check(calls)
    rows = take_turns(calls)
    floor = rows["two GEMMs"]["ms"]
    print(f"\n{'×'.join(map(str, shape))}, tokens × vocabulary × hidden")
    for name, row in rows.items():
        row["x_gemms"] = row["ms"] / floor
        print(f"  {name:22}{row['ms']:9.2f} ms{row['x_gemms']:8.3f}{row['peak_bytes'] / GIB:9.3f} GiB", flush=True)
    alone = run_kernel(shape[1], copy)
    print(f"  kernel: {alone['us']:.1f} µs on {alone['rows']} rows, {alone['fraction_of_copy']:.0%} of a copy")
    return {"shape": shape, "rows": rows, "kernels": {"halfbyte": alone}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--chunks", default="", help="rows at a time to try, with commas")
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s, {torch.cuda.get_device_name()}")
    chunks = [int(rows) for rows in given.chunks.split(",") if rows]
    results = []
    for text in given.shapes.split(","):
        tokens, vocabulary, width = (int(size) for size in text.split("x"))
        results.append(run_shape((tokens, vocabulary, width), chunks, copy))
        torch.cuda.empty_cache()
    found = importlib.util.find_spec("liger_kernel")
    liger = metadata.version("liger-kernel") if found else None
    write_result(given.json, {"copy_TBps": copy, "dtype": "bfloat16", "liger": liger, "shapes": results})


if __name__ == "__main__":
    main()
