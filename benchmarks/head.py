"""The cross-entropy of a frozen head, compared with its two GEMMs, on one CUDA device.

    python -m benchmarks.head [--shapes 16384x128256x4096,8192x128256x4096,16384x151936x1024] [--json FILE]

The floor of a shape (tokens × vocabulary × hidden) is X·Wᵀ and dZ·W alone, unchunked. Every implementation computes the
mean loss and dX from bf16 inputs; they take turns, so that all run at the same clocks. Memory is the peak above the
inputs. Peers: torch with full logits, the same compiled, and Liger if installed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import copy_bandwidth, liger_version, milliseconds, parser_of, require_gpu, write_result
from halfbyte.autograd.losses import linear_cross_entropy, linear_log_probs

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
    """Return the loss and dX."""
    value = loss(hidden, weight, labels)
    return value.detach(), torch.autograd.grad(value, hidden)[0]


def implementations(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Call]:
    arguments = hidden, weight, labels
    losses: dict[str, Callable[..., Tensor]] = {"halfbyte": ours, "halfbyte log-probs": ours_log_probs}
    losses |= {"torch, full logits": full_logits, "torch.compile": torch.compile(full_logits, fullgraph=True)}
    if liger_version() is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        losses["liger"] = lambda *arguments: LigerFusedLinearCrossEntropyFunction.apply(*arguments)[0]
    calls: dict[str, Call] = {"two GEMMs": partial(two_gemms, *arguments)}
    calls |= {name: partial(trained, loss, *arguments) for name, loss in losses.items()}
    return calls


def check(calls: dict[str, Call]) -> None:
    """Exit unless all agree: the loss to 1e-3, dX to 2% (bf16's error in these sums)."""
    results = {name: call() for name, call in calls.items() if name != "two GEMMs"}
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
    """Return the median ms and the peak bytes of each call."""
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return {name: {"ms": statistics.median(times[name]), "peak_bytes": peaks[name]} for name in calls}


def run_shape(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Measure and print one shape."""
    torch._dynamo.reset()
    calls = implementations(*inputs(*shape))
    check(calls)
    rows = take_turns(calls)
    floor = rows["two GEMMs"]["ms"]
    print(f"\n{'×'.join(map(str, shape))}, tokens × vocabulary × hidden")
    for name, row in rows.items():
        row["x_gemms"] = row["ms"] / floor
        print(f"  {name:22}{row['ms']:9.2f} ms{row['x_gemms']:8.3f}{row['peak_bytes'] / GIB:9.3f} GiB", flush=True)
    return {"shape": shape, "rows": rows}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--shapes", default=SHAPES)
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    require_gpu()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"copy {copy:.2f} TB/s, {torch.cuda.get_device_name()}")
    results = []
    for text in given.shapes.split(","):
        tokens, vocabulary, width = (int(size) for size in text.split("x"))
        results.append(run_shape((tokens, vocabulary, width)))
        torch.cuda.empty_cache()
    write_result(given.json, {"copy_TBps": copy, "dtype": "bfloat16", "liger": liger_version(), "shapes": results})


if __name__ == "__main__":
    main()
