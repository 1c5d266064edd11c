"""Quantized weights on a GPU: dequantizing them, and multiplying 1 to 64 rows by them.

    python -m benchmarks.weights dequantize [--json FILE]
    python -m benchmarks.weights gemv [--specs nf4,kbit4,int8] [--rows 1,4,16,64] [--shapes 4096x14336] [--card rtx4090]
                                          [--json FILE]

`dequantize` compares NF4 with bitsandbytes, in TB/s of packed bytes read and bf16 values written. `gemv` compares x·Wᵀ
from packed weights with cuBLAS on a bf16 weight of the same shape; with `--card`, kernels and tiles are chosen as for
another card, on this one. Both rotate over weights that together exceed the L2
cache, and report fractions of a device copy's bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import copy_bandwidth, event_us, graph_us, parser_of, require_gpu, write_result
from halfbyte.formats import Blockwise4, Format, named
from halfbyte.formats.int4 import Int4
from halfbyte.kernels.device import KNOWN, assumed

DEQUANTIZED = [(4096, 4096), (14336, 4096), (28672, 8192)]
SPECS = (
    "nf4,kbit:2:nf,kbit:3:nf,kbit:4:nf,kbit:5:nf,hqq:4:64,hqq:8:64,int8,fp8:row,fp8:tile,nvfp4,nvfp4-1d,mxfp4,"
    "gptq:128:float16:runs"
)
SHAPES = "4096x14336,14336x4096,8192x28672"
ROTATE = 4e8  # bytes that one rotation over the weights reads, eight times the L2 cache


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def dequantize() -> dict[str, Any]:
    """Time halfbyte's and bitsandbytes' NF4 dequantization, with plain and nested scales."""
    import bitsandbytes.functional as peer

    result: dict[str, Any] = {"copy_TBps": copy_bandwidth(), "shapes": {}}
    for shape in DEQUANTIZED:
        weight = random_weight(*shape)
        copies = min(max(2, int(6e8 / weight.numel() / 2)), 8)
        for nested in (False, True):
            format_ = Blockwise4("nf4", 64, nested)
            ours = [format_.quantize(weight) for _ in range(copies)]
            theirs = [peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested) for _ in range(copies)]
            calls = [partial(format_.dequantize, parts, shape, torch.bfloat16) for parts in ours]
            peer_calls = [partial(peer.dequantize_4bit, *packed) for packed in theirs]
            moved = weight.numel() * 2.5 + weight.numel() / 64 * (1 if nested else 4)
            times = {
                "ours_graph_us": graph_us(calls),
                "ours_called_us": event_us(calls),
                "bitsandbytes_called_us": event_us(peer_calls),
                "bitsandbytes_graph_us": graph_us(peer_calls),
            }
            row = {**times, **{name.replace("_us", "_TBps"): moved / us / 1e6 for name, us in times.items()}}
            row["ratio_graph"] = times["bitsandbytes_graph_us"] / times["ours_graph_us"]
            row["ratio_called"] = times["bitsandbytes_called_us"] / times["ours_called_us"]
            name = f"{shape[0]}x{shape[1]}{' nested' if nested else ''}"
            result["shapes"][name] = row
            print(
                f"{name:18} halfbyte {row['ours_graph_TBps']:.2f} TB/s (called {row['ours_called_TBps']:.2f}), "
                f"bitsandbytes {row['bitsandbytes_graph_TBps']:.2f} (called {row['bitsandbytes_called_TBps']:.2f})",
                flush=True,
            )
    return result


def dense_us(x: Tensor, rows: int) -> float:
    """Time cuBLAS in bf16 on a weight of `rows` rows."""
    count = max(2, int(ROTATE / (rows * x.shape[1] * 2)))
    return graph_us([partial(F.linear, x, random_weight(rows, x.shape[1])) for _ in range(count)])


def packed_weights(format_: Format, shape: tuple[int, int]) -> tuple[list[dict[str, Any]], float]:
    """Return enough quantized weights to exceed the cache, and the bytes of one."""
    size = shape[0] * shape[1] * format_.bits_per_weight(shape) / 8
    weights = [random_parts(format_, shape) for _ in range(2)]
    count = max(2, int(ROTATE / size))
    return [{name: part.clone() for name, part in weights[i % 2].items()} for i in range(count)], size


def random_parts(format_: Format, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return a quantized random weight; of formats that only other tools quantize to, random codes."""
    if not isinstance(format_, Int4):
        return format_.quantize(random_weight(*shape))
    words = torch.iinfo(torch.int32)
    parts = {}
    for name, (size, dtype) in format_.part_specs(shape).items():
        codes = torch.randint(words.min, words.max, size, dtype=torch.int32, device="cuda")
        parts[name] = torch.rand(size, device="cuda").mul_(0.01).to(dtype) if name == "scales" else codes
    return parts


def gemv(specs: Sequence[str], shapes: Sequence[str], batches: Sequence[int]) -> dict[str, Any]:
    """Time x·Wᵀ for every shape, format and number of rows of x. The error is relative to fp32."""
    result: dict[str, Any] = {"copy_TBps": (copy := copy_bandwidth()), "rows": []}
    for name in shapes:
        rows, columns = map(int, name.split("x"))
        inputs = {batch: torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16) for batch in batches}
        dense = {batch: dense_us(x, rows) for batch, x in inputs.items()}
        for spec in specs:
            format_, shape = named(spec), (rows, columns)
            weights, size = packed_weights(format_, shape)
            exact = format_.dequantize(weights[0], shape, torch.float32)
            for batch, x in inputs.items():
                us = graph_us([partial(format_.linear, x, parts, shape, None) for parts in weights])
                expected = x.float() @ exact.T
                error = float((format_.linear(x, weights[0], shape, None) - expected).norm() / expected.norm())
                row = {"shape": name, "spec": spec, "batch": batch, "us": us, "cublas_us": dense[batch],
                       "of_copy": size / us / 1e6 / copy, "error": error}  # fmt: skip
                result["rows"].append(row)
                print(f"{name:>11} {spec:10} {batch:2} rows: {us:6.1f} µs, {row['of_copy']:.0%} of a copy, "
                      f"{dense[batch] / us:.2f}x cuBLAS; error {error:.1e}", flush=True)  # fmt: skip
    return result


def parser() -> argparse.ArgumentParser:
    arguments = parser_of(__doc__)
    arguments.add_argument("what", choices=["dequantize", "gemv"])
    arguments.add_argument("--specs", default=SPECS, help="formats, by name or spec")
    arguments.add_argument("--shapes", default=SHAPES)
    arguments.add_argument("--rows", default="1,4,16,64", help="rows of x")
    arguments.add_argument("--card", choices=sorted(KNOWN), help="card to choose kernels for; default: this one")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    require_gpu()
    if options.what == "dequantize":
        return write_result(options.json, dequantize())
    batches = [int(rows) for rows in options.rows.split(",")]
    with assumed(KNOWN[options.card]) if options.card else contextlib.nullcontext():
        result = gemv(options.specs.split(","), options.shapes.split(","), batches)
    write_result(options.json, {"card": options.card, **result})


if __name__ == "__main__":
    main()
