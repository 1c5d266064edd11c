"""Products of few rows of x with 4-bit weights on tensor cores, from Ampere on: `cuda/few_rows.cuh` and its formats.

A launch takes up to 16 rows. More rows are multiplied 16 at a time where the alternative is to dequantize the weight.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.bitplane import linear_bitplane
from ...formats.blockwise4 import linear_blockwise4
from ...formats.e2m1 import linear_e2m1
from ...formats.hqq import linear_hqq
from ...formats.int4 import linear_int4
from ...formats.linear import add_term
from ..device import AMPERE, architecture_of, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemv4, remembered

TILE, UNIT = 16, 256  # rows of W in a tile, columns of a unit
LAUNCH_ROWS = 16  # rows of x that a launch takes
MOST_ROWS = 48  # three launches take 53 to 60 µs for 4096×14336, dequantizing the weight takes 75 (H200)
MOST_PLANES_ROWS = 32  # three launches for 5 or 8 bits in planes take 99 and 105 µs
FEWEST_OUTPUTS = 2 * TILE


class E2m1Weight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_e2m1.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "of_all")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
        ("read_factor", ctypes.c_float),  # set by the kernel
    )


class Int4Weight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_int4.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "zeros", "scales")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
    )


class PlanesWeight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_planes.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "zeros", "codebook")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
        ("of_all", ctypes.c_void_p),
        ("read_factor", ctypes.c_float),  # set by the kernel
    )


class Blocks(NamedTuple):
    """Constants of `cuda/few_rows.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


FEW = (Blocks(1, 1, 16), Blocks(1, 2, 8), Blocks(1, 4, 4), Blocks(2, 1, 16), Blocks(2, 2, 8))
MORE = (Blocks(2, 1, 8), Blocks(2, 2, 4))  # for 9 to 16 rows, which need more registers


def blocks_for(rows: int, columns: int, batch: int, multiprocessors: int) -> Blocks:
    """Blocks with the fewest steps of the busiest warp.

    A step is a unit of one tile. Two tiles at a time share loads of x and take 1.6 to 1.8 steps; adding the sums of a
    group takes a third of one (measured on an H200).
    """

    def steps(blocks: Blocks) -> float:
        passes = ceil_div(ceil_div(rows, TILE * blocks.rt), multiprocessors * blocks.wr)
        unit = 1.0 if blocks.rt == 1 else 1.8 if batch <= 4 else 1.6
        return passes * (ceil_div(columns // UNIT, blocks.wk) * unit + 0.35)

    return min(FEW if batch <= 8 else MORE, key=steps)


@remembered
def _kernel(
    name: str, blocks: Blocks, tiles: int, bf16: bool, constants: tuple[tuple[str, int], ...],
    struct: type[ctypes.Structure], device: int, batch: int,
) -> Kernel:  # fmt: skip
    """Compile and load for `batch` rows of x in `tiles` tiles of 8."""
    every = dict(zip(("RT", "WR", "WK"), blocks, strict=True)) | {"NT": tiles, "BF16": int(bf16)}
    image = cubin(name, architecture_of(device), every | dict(constants) | {"ORIGIN": origin_of(device)}, [struct])
    return Kernel(image, name, image.shared_for(batch))


def _launch(
    name: str, weight: ctypes.Structure, x: Tensor, bias: Tensor | None, blocks: Blocks | None, **constants: int
) -> Tensor:
    """[M, N] = x·Wᵀ + b, `LAUNCH_ROWS` rows at a time."""
    rows, columns = weight.rows, weight.columns
    x, device = x.contiguous(), x.get_device()
    multiprocessors = multiprocessors_of(device)
    out = torch.empty(x.shape[0], rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device(device):
        for begin in range(0, x.shape[0], LAUNCH_ROWS):
            part = x[begin : begin + LAUNCH_ROWS]
            batch, tiles = part.shape[0], ceil_div(part.shape[0], 8)
            chosen = blocks or blocks_for(rows, columns, batch, multiprocessors)
            bf16, key = x.dtype is torch.bfloat16, tuple(constants.items())
            kernel = _kernel(name, chosen, tiles, bf16, key, type(weight), device, 8 * tiles)
            tensors = (part, bias, out[begin:])
            pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]
            grid = min(ceil_div(rows, TILE * chosen.rt * chosen.wr), multiprocessors)
            kernel(grid, 32 * chosen.wr * chosen.wk, [weight, *pointers, ctypes.c_uint32(batch)])
    return out


def _obstacle(x: Tensor, rows: int, most: int, tensors: Sequence[Tensor]) -> str | None:
    """Return why the kernels refuse a weight of `rows` rows, or None."""
    if not 1 <= x.shape[0] <= most:
        return f"takes 1 to {most} rows of x"
    if not device_of(x).at_least(AMPERE):
        return "needs Ampere"
    if x.dtype is torch.float32:
        return "needs 16 bits"
    if x.shape[1] % UNIT or not x.shape[1] or rows % TILE or rows < FEWEST_OUTPUTS:
        return "needs K in multiples of 256, and N in multiples of 16 from 32"
    if any(tensor.data_ptr() % 16 for tensor in (x, *tensors)):
        return "needs tensors at multiples of 16 bytes"
    return None


# --- NF4 and FP4 -----------------------------------------------------------------------------------------------------


def blockwise4_obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int, *_: Any
) -> str | None:
    if blocksize != gemv4.BLOCKSIZE:
        return "needs blocks of 64"
    return _obstacle(x, rows, LAUNCH_ROWS, (packed, absmax))


@linear_blockwise4.kernel("cuda", unless=blockwise4_obstacle, rank=3)  # after gemv4, which is faster on Hopper
def few_rows_blockwise4(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: gemv4.Term = None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    weight = gemv4.weight_of(x, packed, absmax, nested, quant_type, rows)
    return add_term(_launch("few_rows4", weight, x, bias, blocks, NESTED=int(nested is not None)), term)


# --- NVFP4 and MXFP4 -------------------------------------------------------------------------------------------------


def e2m1_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], *_: Any
) -> str | None:
    if factor is None and x.dtype is torch.float16:
        return "needs bf16, as fp16 does not hold every scale"
    return _obstacle(x, packed.shape[0], MOST_ROWS, (packed, scales))


@linear_e2m1.kernel("cuda", unless=e2m1_obstacle)
def few_rows_e2m1(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    pointers = [tensor.data_ptr() for tensor in (packed, scales, scales if factor is None else factor)]
    weight = E2m1Weight(*pointers, packed.shape[0], x.shape[1])
    return _launch("few_rows_e2m1", weight, x, bias, blocks, BLOCK=tile[1], TALL=tile[0])


# --- GPTQ, AWQ and compressed-tensors --------------------------------------------------------------------------------


def int4_obstacle(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, *_: Any
) -> str | None:
    groups, rows = scales.shape
    group = x.shape[1] // max(groups, 1)
    if group_index is not None:
        return "needs groups of equal sizes"
    if scales.dtype is torch.float32:
        return "needs scales of 16 bits"
    if group not in (32, 64, 128) and group % UNIT:
        return "needs groups of 32, 64, 128 or a multiple of 256"
    return _obstacle(x, rows, MOST_ROWS, (qweight, qzeros, scales))


@linear_int4.kernel("cuda", unless=int4_obstacle)
def few_rows_int4(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, order: Tensor | None,
    zero_shift: int, bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    groups, rows = scales.shape
    if order is not None:
        x = x.index_select(1, order[0])
    weight = Int4Weight(*[tensor.data_ptr() for tensor in (qweight, qzeros, scales)], rows, x.shape[1])
    bf16 = int(scales.dtype is torch.bfloat16)
    group = x.shape[1] // groups
    return _launch("few_rows_int4", weight, x, bias, blocks, GROUP=group, SHIFT=zero_shift, SCALES_BF16=bf16)


# --- k-bit formats and HQQ -------------------------------------------------------------------------------------------


def bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    return _obstacle(x, rows, MOST_PLANES_ROWS, (packed, scales))


@linear_bitplane.kernel("cuda", unless=bitplane_obstacle, rank=4)
def few_rows_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    pointers = [tensor.data_ptr() for tensor in (packed, scales, scales, codebook)]  # zeros are not read
    weight = PlanesWeight(*pointers, rows, x.shape[1], factor.data_ptr())
    bits = codebook.numel().bit_length() - 1
    return _launch("few_rows_planes", weight, x, bias, blocks, BITS=bits, GROUP=0)


def hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, *_: Any
) -> str | None:
    if x.dtype is torch.float16:
        return "needs bf16, as fp16 does not hold every scale"
    return _obstacle(x, rows, MOST_PLANES_ROWS, (packed, scales, zeros))


@linear_hqq.kernel("cuda", unless=hqq_obstacle, rank=3)
def few_rows_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    pointers = [tensor.data_ptr() for tensor in (packed, scales, zeros)]
    weight = PlanesWeight(*pointers, None, rows, x.shape[1], None)
    return _launch("few_rows_planes", weight, x, bias, blocks, BITS=bits, GROUP=group)
