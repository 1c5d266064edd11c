"""Products of 1 to 64 rows with an NF4 weight (nested scales) beside cuBLAS in bf16, on a GPU, from a CUDA graph.

python -m benchmarks.gemv [--sweep] [--batches 1,4] [--json FILE]

Calls rotate over weights, so that none comes from the cache. TB/s is of packed bytes: codes and scales. `--sweep` times
every block shape of the CUDA kernels and prints the best; without it, what `linear_blockwise4` picks is timed. Other
formats: `benchmarks.gemv_formats`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import copy_bandwidth, graph_us, write_result
from halfbyte.dispatch import Unavailable
from halfbyte.formats import Blockwise4
from halfbyte.kernels.cuda import gemm4, gemv4, gemv4_row
from halfbyte.kernels.cuda.gemv4 import Blocks, image
from halfbyte.kernels.device import HOPPER_SHARED_BYTES
from halfbyte.kernels.tiling import ceil_div, power_of_2
from halfbyte.ops.blockwise4 import linear_blockwise4

SHAPES = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)]
BATCHES = (1, 2, 4, 8, 16, 32, 64)
ROTATE = 4e8  # bytes that a round over the weights reads at least, eight times the second-level cache


def candidates(batch: int) -> list[Blocks]:
    """Every block shape of the CUDA kernel worth a try for `batch` rows of x."""
    groups = ((1, 16), (2, 8), (4, 4), (8, 2), (1, 8), (2, 4), (4, 2))
    found = [Blocks(rt, *warps, stages) for rt, warps, stages in itertools.product((1, 2), groups, (2, 3, 4))]
    return [blocks for blocks in found if blocks.wr * blocks.wk * blocks.rt * (blocks.stages - 1) >= 24]


def weights_of(rows: int, columns: int) -> list[tuple]:
    """Arguments of `linear_blockwise4` between x and bias."""
    format_ = Blockwise4("nf4", 64, True)
    made = []
    for _ in range(max(2, int(ROTATE / (rows * columns / 2)))):
        parts = format_.quantize(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16))
        nested = parts["nested_absmax"], parts["nested_code"], parts["nested_offset"]
        made.append((parts["packed"], parts["absmax"], nested, 64, "nf4", rows))
    return made


def dense_us(x: Tensor, rows: int) -> float:
    """cuBLAS in bf16 over weights that together pass the cache as often."""
    columns = x.shape[1]
    dense = [
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        for _ in range(max(2, int(ROTATE / (rows * columns * 2))))
    ]
    return graph_us([partial(F.linear, x, weight) for weight in dense])


def error_of(x: Tensor, weight: tuple) -> float:
    """Relative error against the fp32 weight and fp32 sums."""
    expected = linear_blockwise4.reference(x.float(), *weight, None)
    return float((linear_blockwise4(x, *weight, None) - expected).norm() / expected.norm())


def sweep(x: Tensor, weights: list[tuple]) -> list[tuple[float, tuple]]:
    """(µs, blocks) of each block shape, best first."""
    shapes = candidates(x.shape[0])
    rest = x.get_device(), power_of_2(ceil_div(x.shape[0], 8)), x.dtype is torch.bfloat16
    with ThreadPoolExecutor(16) as pool:  # NVRTC leaves Python's lock
        images = list(pool.map(lambda blocks: image(blocks, *rest, True), shapes))
    times = []
    for blocks, built in zip(shapes, images, strict=True):
        if built.shared_for(8 * rest[1]) > HOPPER_SHARED_BYTES:
            continue
        calls = [partial(gemv4.gemm, x, *weight, None, blocks=blocks) for weight in weights]
        times.append((graph_us(calls, 5), tuple(blocks)))
    return sorted(times)


def sweep_row(x: Tensor, weights: list[tuple]) -> list[tuple[float, tuple]]:
    """The same for what takes one or two rows."""
    warps = [(wr, wk) for wr in (1, 2, 4, 8) for wk in range(1, 17) if 8 <= wr * wk <= 16]
    batch, bf16, device = x.shape[0], x.dtype is torch.bfloat16, x.get_device()
    shapes = [gemv4_row.Blocks(rt, *groups) for rt in (1, 2) for groups in warps]
    with ThreadPoolExecutor(16) as pool:
        images = list(pool.map(lambda blocks: gemv4_row.image(blocks, device, batch, bf16, True, 64), shapes))
    times = []
    for blocks, built in zip(shapes, images, strict=True):
        if built.shared > HOPPER_SHARED_BYTES:
            continue
        calls = [partial(gemv4_row.gemv, x, *weight, None, blocks=blocks) for weight in weights]
        times.append((graph_us(calls, 5), tuple(blocks)))
    return sorted(times)


def sweep_gemm(x: Tensor, weights: list[tuple]) -> list[tuple[float, tuple]]:
    """The same for what takes more rows."""
    times = []
    for groups, stages in itertools.product((2, 4), (3, 4, 5)):
        calls = [partial(gemm4.gemm, x, *weight, None, blocks=gemm4.Blocks(groups, stages)) for weight in weights]
        with contextlib.suppress(Unavailable):  # which takes too much shared memory
            times.append((graph_us(calls, 5), (groups, stages)))
    return sorted(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--shapes", default=",".join(f"{n}x{k}" for n, k in SHAPES))
    parser.add_argument("--json")
    given = parser.parse_args()
    copy = copy_bandwidth()
    result: dict = {"copy_TBps": copy, "rows": []}
    print(f"copy {copy:.2f} TB/s")
    for shape in given.shapes.split(","):
        rows, columns = map(int, shape.split("x"))
        weights = weights_of(rows, columns)
        moved = rows * columns * (0.5 + 1 / 64)
        for batch in map(int, given.batches.split(",")):
            x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
            ours = graph_us([partial(linear_blockwise4, x, *weight, None) for weight in weights])
            dense, error = dense_us(x, rows), error_of(x, weights[0])
            rate = moved / ours / 1e6
            row = {"shape": shape, "batch": batch, "us": ours, "cublas_us": dense, "ratio": dense / ours, "TBps": rate,
                   "of_copy": rate / copy, "error": error}  # fmt: skip
            print(f"{shape:>11} M={batch:<2}: {ours:6.1f} µs, {rate:.2f} TB/s ({rate / copy:.0%} of copy), "
                  f"cuBLAS {dense:6.1f} µs: {dense / ours:.2f}x; error {error:.1e}", flush=True)  # fmt: skip
            if given.sweep:
                by = sweep_row if batch <= gemv4_row.BATCH else sweep if batch < gemm4.FEWEST else sweep_gemm
                row["sweep"] = by(x, weights)
                best = ", ".join(f"{us:.1f} {blocks}" for us, blocks in row["sweep"][:8])
                print(f"    {best}", flush=True)
            result["rows"].append(row)
    write_result(given.json, result)


if __name__ == "__main__":
    main()
