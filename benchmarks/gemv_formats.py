"""Products of 1 to 64 rows with k-bit, HQQ, int8 and FP8 weights beside cuBLAS in bf16, on a GPU, from a CUDA graph.

python -m benchmarks.gemv_formats [--specs kbit:2:nf,int8] [--batches 1,4] [--shapes 4096x14336] [--sweep] [--json FILE]

Calls rotate over weights, so that none comes from the cache. Fractions are of a copy's bandwidth, on packed bytes:
codes and scales. `--sweep` times other block shapes of the kernel for k-bit weights too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import copy_bandwidth, graph_us, write_result
from benchmarks.gemv import ROTATE, dense_us
from halfbyte.dispatch import Unavailable
from halfbyte.formats import Format, KBit, from_spec
from halfbyte.kernels.cuda import linear_planes

SPECS = ("kbit:2:nf", "kbit:3:nf", "kbit:4:nf", "kbit:5:nf", "hqq:2:64", "hqq:3:64", "hqq:4:64", "hqq:8:64",
         "int8", "fp8:row", "fp8:tensor", "fp8:tile")  # fmt: skip
SHAPES, BATCHES = ("4096x14336", "14336x4096", "8192x28672"), ("1", "4", "16", "64")


def weights_of(format_: Format, shape: tuple[int, int]) -> tuple[list[dict], float]:
    """Parts of as many random weights as pass the cache, and the bytes of one."""
    size = shape[0] * shape[1] * format_.bits_per_weight(shape) / 8
    count = max(2, int(ROTATE / size))
    made = [format_.quantize(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02) for _ in range(2)]
    return [{name: part.clone() for name, part in made[i % 2].items()} for i in range(count)], size


def error_of(format_: Format, parts: dict, shape: tuple[int, int], x: Tensor) -> float:
    """Relative error against the fp32 weight and fp32 sums."""
    expected = x.float() @ format_.dequantize(parts, shape, torch.float32).T
    return float((format_.linear(x, parts, shape, None) - expected).norm() / expected.norm())


def candidates(batch: int) -> list[linear_planes.Gemm16Blocks] | list[linear_planes.GemvBlocks]:
    """Block shapes of the kernel for so many rows."""
    warps = itertools.product((1, 2), (8, 12, 16), (1, 2, 4, 8))
    shapes = [(rt, groups, count // groups) for rt, count, groups in warps if count % groups == 0]
    if batch == 1:
        return [linear_planes.GemvBlocks(*shape) for shape in shapes]
    shapes = [shape for shape in shapes if math.prod(shape) <= 16]
    return [linear_planes.Gemm16Blocks(*shape, stages) for shape in shapes for stages in (2, 3)]


def sweep(format_: KBit, weights: list[dict], shape: tuple[int, int], x: Tensor) -> list[tuple[float, tuple]]:
    """(µs, blocks) of block shapes, best first."""
    times = []
    for blocks in candidates(x.shape[0]):
        calls = []
        for parts in weights:
            packed, scales = parts["packed"], parts["scales"]
            rest = parts["factor"], format_.levels(parts)
            if isinstance(blocks, linear_planes.GemvBlocks):
                calls.append(partial(linear_planes.gemv_bitplane, x, packed, scales, *rest, shape[0], None, blocks))
            else:
                numbers = format_.k, 0, shape[0], None, blocks
                calls.append(partial(linear_planes.gemm16, x, packed, scales, scales, *rest, *numbers))
        with contextlib.suppress(Unavailable):  # which takes too much shared memory
            times.append((graph_us(calls, 5), tuple(blocks)))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--specs", default=",".join(SPECS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--batches", default=",".join(BATCHES))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    copy = copy_bandwidth()
    result: dict = {"copy_TBps": copy, "rows": []}
    print(f"copy {copy:.2f} TB/s")
    for name in given.shapes.split(","):
        rows, columns = map(int, name.split("x"))
        batches = {batch: torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
                   for batch in map(int, given.batches.split(","))}  # fmt: skip
        dense = {batch: dense_us(x, rows) for batch, x in batches.items()}
        print(f"{name} cuBLAS bf16: " + ", ".join(f"M={batch} {us:.1f} µs" for batch, us in dense.items()))
        for spec in given.specs.split(","):
            format_, shape = from_spec(spec), (rows, columns)
            weights, size = weights_of(format_, shape)
            for batch, x in batches.items():
                us = graph_us([partial(format_.linear, x, parts, shape, None) for parts in weights])
                row = {"shape": name, "spec": spec, "batch": batch, "us": us, "cublas_us": dense[batch],
                       "of_copy": size / us / 1e6 / copy, "error": error_of(format_, weights[0], shape, x)}  # fmt: skip
                print(f"  {spec:10} M={batch:<2} {us:6.1f} µs, {row['of_copy']:.0%} of copy, "
                      f"{dense[batch] / us:.2f}x cuBLAS; error {row['error']:.1e}", flush=True)  # fmt: skip
                if given.sweep and isinstance(format_, KBit) and batch <= 16:
                    row["sweep"] = sweep(format_, weights, shape, x)
                    print("    " + ", ".join(f"{us:.1f} {blocks}" for us, blocks in row["sweep"][:6]), flush=True)
                result["rows"].append(row)
    write_result(given.json, result)


if __name__ == "__main__":
    main()
