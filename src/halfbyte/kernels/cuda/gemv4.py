"""`cuda/gemv4.cu`: GEMM of up to 16 rows with a 4-bit weight on tensor cores; shared parts of the 4-bit kernels."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import linear_blockwise4
from ...formats.codebooks import codebook4
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Image, Kernel, cubin, remembered

# most rows of x; weights per scale; columns of K per iteration of a warp
BATCH = 16
BLOCKSIZE = 64
STEP = 256

Nested = tuple[Tensor, Tensor, Tensor] | None
Term = tuple[Tensor, Tensor] | None  # u [M, r], B [N, r]


class Blocks(NamedTuple):
    """Constants of `cuda/split_k.cuh`: 16 · `rt` rows a tile, `wr` groups of `wk` warps, `stages` of the ring."""

    rt: int
    wr: int
    wk: int
    stages: int


class Weight(ctypes.Structure):
    """The struct of this name in `cuda/weight4.cuh`; `cuda/row4.cu` and `cuda/gemm4.cu` have structs of this size."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "absmax", "second", "code", "offset", "codebook")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
        ("shift", ctypes.c_float * 2),  # set by the kernel
    )


def blocks_for(rows: int, batch: int, multiprocessors: int) -> Blocks:
    """One group per tile of a multiprocessor, at most 8, so that all tiles run concurrently."""
    rt, warps = (1, 16) if batch <= 8 else (2, 8)
    tiles = ceil_div(ceil_div(rows, 16 * rt), multiprocessors)
    groups = min(power_of_2(tiles), 8 // rt)
    return Blocks(rt, groups, warps // groups, 3)


def image(blocks: Blocks, device: int, tiles: int, bf16: bool, nested: bool) -> Image:
    """Compile `gemv4.cu` for `tiles` tiles of 8 rows of x."""
    constants = dict(zip(("RT", "WR", "WK", "STAGES"), blocks, strict=True)) | {"NT": tiles, "BF16": int(bf16)}
    constants |= {"NESTED": int(nested), "ORIGIN": origin_of(device)}
    return cubin("gemv4", device_at(device).capability, constants, [Weight])


@remembered
def _kernel(blocks: Blocks, device: int, tiles: int, bf16: bool, nested: bool) -> Kernel:
    code = image(blocks, device, tiles, bf16, nested)
    return Kernel(code, "gemv4", code.shared_for(8 * tiles))


def weight_of(x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, quant_type: str, rows: int) -> Weight:
    """W as the struct of `linear_blockwise4`'s kernels, for the GEMM with x."""
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    of_weight = (packed, absmax, second, code, offset, codebook4(quant_type, x.device))
    return Weight(*[tensor.data_ptr() for tensor in of_weight], rows, x.shape[1])


def mma_obstacle(x: Tensor, *of_weight: Tensor) -> str | None:
    """Return why kernels of `cuda/split_k.cuh` refuse x and the weight's tensors whatever x's rows, or None."""
    if not device_of(x).at_least(HOPPER):  # griddepcontrol
        return NEEDS_HOPPER
    if x.dtype is torch.float32:
        return "needs 16 bits"
    if x.shape[1] % STEP:
        return "needs K in multiples of 256"
    if any(tensor.data_ptr() % 16 for tensor in (x, *of_weight)):
        return "needs tensors at multiples of 16 bytes"
    return None


def obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, *_: Any) -> str | None:
    if not 1 <= x.shape[0] <= BATCH:
        return "takes 1 to 16 rows"
    return "needs blocks of 64" if blocksize != BLOCKSIZE else mma_obstacle(x, packed, absmax)


@linear_blockwise4.kernel("cuda", unless=obstacle, rank=3)
def gemm(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    device = x.get_device()
    batch = x.shape[0]
    multiprocessors, tiles = multiprocessors_of(device), power_of_2(ceil_div(batch, 8))
    blocks = blocks or blocks_for(rows, batch, multiprocessors)
    weight = weight_of(x, packed, absmax, nested, quant_type, rows)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out)]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, tiles, x.dtype is torch.bfloat16, nested is not None)
        grid = min(ceil_div(rows, 16 * blocks.rt), multiprocessors)
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *pointers, ctypes.c_uint32(batch)])
    return out
