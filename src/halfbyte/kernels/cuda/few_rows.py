"""Products of few rows of x with 4-bit weights on tensor cores, from Turing on: `cuda/few_rows.cuh` and its formats.

Up to 8 rows take one launch. With more rows K is divided among blocks, and a second launch adds their sums.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.bitplane import linear_bitplane
from ...formats.blockwise4 import linear_blockwise4
from ...formats.e2m1 import linear_e2m1
from ...formats.hqq import linear_hqq
from ...formats.int4 import linear_int4
from ...formats.linear import add_term
from ..device import AMPERE, TURING, architecture_of, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemm4, gemv4, linear_planes, remembered

TILE, UNIT = 16, 256  # rows of W in a tile, columns of a unit
WHOLE_ROWS = 8  # rows of x up to which a block computes all of K
MOST_ROWS = 64
MOST_SMALL = 48  # with nested scales and `SMALL` shared memory
FEWEST_OUTPUTS = 2 * TILE
SMALL = 64 * 1024  # shared memory of a block with which tables have fewer copies (Turing)


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


WHOLE = (Blocks(1, 1, 16), Blocks(1, 2, 8), Blocks(1, 4, 4), Blocks(2, 1, 8), Blocks(2, 2, 4))
SPLIT = Blocks(2, 8, 1)


def blocks_for(rows: int, columns: int, multiprocessors: int) -> Blocks:
    """Blocks with the fewest steps of the busiest warp.

    A step is a unit of one tile, with 16 warps per multiprocessor. Two tiles at a time, with 8 warps, share loads of x
    and take 0.95 steps; adding the sums of a group takes a third of one.
    """

    def steps(blocks: Blocks) -> float:
        passes = ceil_div(ceil_div(rows, TILE * blocks.rt), multiprocessors * blocks.wr)
        return passes * (ceil_div(columns // UNIT, blocks.wk) * (1.0 if blocks.rt == 1 else 0.95) + 0.35)

    return min(WHOLE, key=steps)


@remembered
def _kernel(
    name: str, blocks: Blocks, tiles: int, bf16: bool, constants: tuple[tuple[str, int], ...],
    struct: type[ctypes.Structure], device: int, split: bool,
) -> tuple[Kernel, Kernel | None]:  # fmt: skip
    """The product with `tiles` tiles of 8 rows of x, and if it is `split` the kernel that adds the blocks' sums."""
    every = dict(zip(("RT", "WR", "WK"), blocks, strict=True)) | {"NT": tiles, "BF16": int(bf16), "SPLIT": int(split)}
    every |= dict(constants) | {"ORIGIN": origin_of(device)}
    image = cubin(name, architecture_of(device), every, [struct, *[gemm4.Sums] * split])
    return Kernel(image, name, image.shared_for(8 * tiles)), Kernel(image, "add", 0) if split else None


def _launch(
    name: str, weight: Any, x: Tensor, bias: Tensor | None, blocks: Blocks | None, term: gemv4.Term = None,
    **constants: int,
) -> Tensor:  # fmt: skip
    """[M, N] = x·Wᵀ + b + u·Bᵀ."""
    rows, columns, batch = weight.rows, weight.columns, x.shape[0]
    x, device = x.contiguous(), x.get_device()
    multiprocessors, split = multiprocessors_of(device), batch > WHOLE_ROWS
    tiles = gemm4.tiles_of(batch) if split else 1
    blocks = blocks or (SPLIT if split else blocks_for(rows, columns, multiprocessors))
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    with torch.cuda.device(device):
        bf16, key = x.dtype is torch.bfloat16, tuple(constants.items())
        product, add = _kernel(name, blocks, tiles, bf16, key, type(weight), device, split)
        groups, threads = ceil_div(rows, TILE * blocks.rt * blocks.wr), 32 * blocks.wr * blocks.wk
        if add is None:
            grid = min(groups, multiprocessors)
            product(grid, threads, [weight, *gemm4.pointers(x, bias, out), ctypes.c_uint32(batch)])
            return add_term(out, term)
        grid = gemm4.grid_for(groups, columns // UNIT, multiprocessors)
        sums = blocks.wr * blocks.rt * TILE * 8 * tiles  # of one block
        partials = torch.empty((grid + groups) * sums, dtype=torch.float32, device=x.device)
        sizes = [ctypes.c_uint32(size) for size in (columns, batch)]
        product(grid, threads, [weight, *gemm4.pointers(x, partials), sizes[1]])
        fused = term if gemm4.adds(term) else None
        added = groups * sums // 4 // gemm4.ADDED
        one = gemm4.sum_of(gemm4.Product(weight, rows, bias, term=fused), partials, out, grid, 0)
        add(added, gemm4.ADDED, [gemm4.sums_of([one], added), *sizes])
    return out if fused is term else add_term(out, term)


def _small(x: Tensor) -> bool:
    return device_of(x).shared_bytes <= SMALL


def _obstacle(x: Tensor, rows: int, *tensors: Tensor) -> str | None:
    """Return why the kernels refuse a weight of `rows` rows, or None."""
    if not 1 <= x.shape[0] <= MOST_ROWS:
        return "takes 1 to 64 rows of x"
    if x.dtype is torch.float32:
        return "needs 16 bits"
    if not device_of(x).at_least(TURING if x.dtype is torch.float16 else AMPERE):
        return "needs Ampere, or Turing for fp16"
    if x.shape[1] % UNIT or not x.shape[1] or rows % TILE or rows < FEWEST_OUTPUTS:
        return "needs K in multiples of 256, and N in multiples of 16 from 32"
    if any(tensor.data_ptr() % 16 for tensor in (x, *tensors)):
        return "needs tensors at multiples of 16 bytes"
    return None


# --- NF4 and FP4 -----------------------------------------------------------------------------------------------------


def blockwise4_obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int, *_: Any
) -> str | None:
    if nested is not None and x.shape[0] > MOST_SMALL and _small(x):
        return "needs more than 64 KiB of shared memory for more than 48 rows with nested scales"
    return _obstacle(x, rows, packed, absmax)


@linear_blockwise4.kernel("cuda", unless=blockwise4_obstacle, rank=3)  # after gemv4, which is faster on Hopper
def few_rows_blockwise4(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: gemv4.Term = None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    weight = gemv4.weight_of(x, packed, absmax, nested, quant_type, rows)
    constants = {"BLOCK": blocksize, "NESTED": int(nested is not None)}
    return _launch("few_rows4", weight, x, bias, blocks, term, **constants)


# --- NVFP4 and MXFP4 -------------------------------------------------------------------------------------------------


def e2m1_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], *_: Any
) -> str | None:
    return _obstacle(x, packed.shape[0], packed, scales)


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
    if group % 8:
        return "needs groups of a multiple of 8"
    return _obstacle(x, rows, qweight, qzeros, scales)


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
    return _obstacle(x, rows, packed, scales)


@linear_bitplane.kernel("cuda", unless=bitplane_obstacle, rank=4)
def few_rows_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    pointers = [tensor.data_ptr() for tensor in (packed, scales, scales, codebook)]  # zeros are not read
    weight = PlanesWeight(*pointers, rows, x.shape[1], factor.data_ptr())
    bits = codebook.numel().bit_length() - 1
    return _launch("few_rows_planes", weight, x, bias, blocks, BITS=bits, GROUP=0, SCALES_BF16=0, SMALL=int(_small(x)))


def hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, *_: Any
) -> str | None:
    if bits not in linear_planes.HQQ_BITS:
        return "takes 2, 3, 4 and 8 bits"
    if scales.dtype is torch.float32 or zeros.dtype is not torch.float16:
        return "needs scales of 16 bits and fp16 zeros"
    return _obstacle(x, rows, packed, scales, zeros)


@linear_hqq.kernel("cuda", unless=hqq_obstacle, rank=3)
def few_rows_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    pointers = [tensor.data_ptr() for tensor in (packed, scales, zeros)]
    weight = PlanesWeight(*pointers, None, rows, x.shape[1], None)
    bf16, small = int(scales.dtype is torch.bfloat16), int(_small(x))
    return _launch("few_rows_planes", weight, x, bias, blocks, BITS=bits, GROUP=group, SCALES_BF16=bf16, SMALL=small)
