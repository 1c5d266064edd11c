"""Quantized weights on a GPU: dequantizing them, and multiplying 1 to 64 rows by them.

    python -m benchmarks.weights dequantize [--peers bitsandbytes,unsloth] [--json FILE]
    python -m benchmarks.weights gemv [--specs nf4,kbit4,int8] [--rows 1,4,16,64] [--shapes 4096x14336] [--card rtx4090]
                                      [--peers tinygemm,bitsandbytes,marlin] [--marlin LIBRARY] [--json FILE]

`dequantize` compares NF4 with peers, in TB/s of packed bytes read and 16-bit values written, called from Python and
replayed in CUDA graphs. `gemv` compares x·Wᵀ from packed weights with cuBLAS on a bf16 weight of the same shape, and
with other projects' products; with `--card`, kernels and tiles are chosen as for another card with this one's number of
multiprocessors. Both rotate over weights that together exceed the L2 cache, and report fractions of a device copy's
bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import copy_bandwidth, event_us, graph_us, parser_of, require_gpu, write_result
from benchmarks.weight_peers import DEQUANTIZATIONS, PRODUCTS, load_marlin
from halfbyte.formats import Blockwise4, Format, named
from halfbyte.formats.int4 import Int4
from halfbyte.kernels.device import AMPERE, KNOWN, assumed, device_of

DEQUANTIZED = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192)]
SPECS = (
    "nf4,kbit:2:nf,kbit:3:nf,kbit:4:nf,kbit:5:nf,hqq:4:64,hqq:8:64,int8,fp8:row,fp8:tile,nvfp4,nvfp4-1d,mxfp4,"
    "gptq:128:float16:runs"
)
SHAPES = "4096x14336,14336x4096,8192x28672"
ROTATE = 4e8  # bytes that one rotation over the weights reads, eight times the L2 cache


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02


def dequantize(peers: Sequence[str]) -> dict[str, Any]:
    """Time halfbyte's and peers' NF4 dequantization to 16 bits, with plain and nested scales."""
    result: dict[str, Any] = {"copy_TBps": copy_bandwidth(), "rows": []}
    for shape, dtype, nested in itertools.product(DEQUANTIZED, (torch.bfloat16, torch.float16), (False, True)):
        weight = random_weight(*shape).to(dtype)
        copies = min(max(2, int(6e8 / weight.numel() / 2)), 8)
        format_ = Blockwise4("nf4", 64, nested)
        packed = [format_.quantize(weight) for _ in range(copies)]
        calls = {"halfbyte": [partial(format_.dequantize, parts, shape, dtype) for parts in packed]}
        calls |= {name: [DEQUANTIZATIONS[name](weight, nested) for _ in range(copies)] for name in peers}
        times = {name: {"called_us": event_us(work), "graph_us": graph_us(work)} for name, work in calls.items()}
        moved = weight.numel() * 2.5 + weight.numel() / 64 * (1 if nested else 4)
        row = {"shape": f"{shape[0]}x{shape[1]}", "dtype": str(dtype), "nested": nested, **times}
        row["TBps"] = moved / times["halfbyte"]["graph_us"] / 1e6
        result["rows"].append(row)
        ratios = "; ".join(
            f"{name} {times[name]['called_us'] / times['halfbyte']['called_us']:.2f}x called, "
            f"{times[name]['graph_us'] / times['halfbyte']['graph_us']:.2f}x in graphs"
            for name in peers
        )
        print(f"{row['shape']:11} {row['dtype']:14} nested {nested!s:5} {row['TBps']:.2f} TB/s, "
              f"called {times['halfbyte']['called_us']:.1f} µs; {ratios}", flush=True)  # fmt: skip
    return result


def dense_us(x: Tensor, rows: int) -> float:
    """Time cuBLAS in x's dtype on a weight of `rows` rows."""
    count = max(2, int(ROTATE / (rows * x.shape[1] * 2)))
    return graph_us([partial(F.linear, x, random_weight(rows, x.shape[1]).to(x.dtype)) for _ in range(count)])


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


def gemv(specs: Sequence[str], shapes: Sequence[str], batches: Sequence[int], peers: Sequence[str]) -> dict[str, Any]:
    """Time x·Wᵀ for every shape, format and number of rows of x, in fp16 for cards before Ampere, else in bf16.

    The error is relative to fp32.
    """
    result: dict[str, Any] = {"copy_TBps": (copy := copy_bandwidth()), "rows": [], "peers": []}
    for name in shapes:
        rows, columns = map(int, name.split("x"))
        inputs = {batch: torch.randn(batch, columns, device="cuda") for batch in batches}
        half = torch.bfloat16 if device_of(inputs[batches[0]]).at_least(AMPERE) else torch.float16
        inputs = {batch: x.to(half) for batch, x in inputs.items()}
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
        for peer in peers:
            _, size = PRODUCTS[peer](rows, columns)
            products = [PRODUCTS[peer](rows, columns)[0] for _ in range(max(2, int(ROTATE / size)))]
            for batch, x in inputs.items():
                us = graph_us([partial(product, x) for product in products])
                of_copy = size / us / 1e6 / copy
                row = {
                    "shape": name,
                    "spec": peer,
                    "batch": batch,
                    "us": us,
                    "cublas_us": dense[batch],
                    "of_copy": of_copy,
                }
                result["peers"].append(row)
                print(f"{name:>11} {peer:10} {batch:2} rows: {us:6.1f} µs, {of_copy:.0%} of a copy", flush=True)
    return result


def parser() -> argparse.ArgumentParser:
    arguments = parser_of(__doc__)
    arguments.add_argument("what", choices=["dequantize", "gemv"])
    arguments.add_argument("--specs", default=SPECS, help="formats, by name or spec")
    arguments.add_argument("--shapes", default=SHAPES)
    arguments.add_argument("--rows", default="1,4,16,64", help="rows of x")
    arguments.add_argument("--peers", default="", help="other projects to compare with")
    arguments.add_argument("--marlin", metavar="LIBRARY", help="library with gptqmodel's Marlin operators")
    arguments.add_argument("--card", choices=sorted(KNOWN), help="card to choose kernels for; default: this one")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    options = parser().parse_args(words)
    require_gpu()
    if options.what == "dequantize":
        return write_result(options.json, dequantize(options.peers.split(",") if options.peers else []))
    if options.marlin:
        load_marlin(options.marlin)
    batches = [int(rows) for rows in options.rows.split(",")]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    card = replace(KNOWN[options.card], multiprocessors=multiprocessors) if options.card else None
    with assumed(card) if card else contextlib.nullcontext():
        result = gemv(
            options.specs.split(","),
            options.shapes.split(","),
            batches,
            options.peers.split(",") if options.peers else [],
        )
    write_result(options.json, {"card": options.card, **result})


if __name__ == "__main__":
    main()
