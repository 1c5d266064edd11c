"""`cuda/row_planes.cu`: GEMV of one row with a k-bit weight."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.gemv_planes import linear_bitplane
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Kernel, cubin, remembered
from .gemv4 import mma_obstacle

ROWS, COLUMNS = 16, 512  # of a tile; what a warp takes at a time, of which K must be a multiple


class Planes(ctypes.Structure):
    """The struct of this name in `cuda/planes.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "zeros", "codebook")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    )


class Blocks(NamedTuple):
    """Constants of `cuda/mma_gemv.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


def blocks_for(bits: int, rows: int, multiprocessors: int) -> Blocks:
    """As many groups as a multiprocessor has tiles, so that they all run at once; 8 at most.

    Two tiles at a time share what is loaded of x: measured as better at 4 bits, as worse at 2 and 3.
    """
    rt = 2 if bits == 4 else 1
    groups = min(power_of_2(ceil_div(ceil_div(rows, rt * ROWS), multiprocessors)), 8)
    return Blocks(rt, groups, 16 // groups)


@remembered
def _kernel(blocks: Blocks, device: int, bf16: bool, bits: int) -> Kernel:
    constants = dict(zip(("RT", "WR", "WK"), blocks, strict=True))
    constants |= {"BITS": bits, "BATCH": 1, "BF16": int(bf16), "ORIGIN": origin_of(device)}
    image = cubin("row_planes", device_at(device).capability, constants, [Planes])
    return Kernel(image, "row_planes")


def obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    if x.shape[0] != 1 or rows < ROWS or x.shape[1] % COLUMNS:
        return "takes one row, N from 16 and K in multiples of 512"
    return mma_obstacle(x, packed, scales)


@linear_bitplane.kernel("cuda", unless=obstacle, rank=1)
def gemv(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    x, device, bits = x.contiguous(), x.get_device(), codebook.numel().bit_length() - 1
    blocks = blocks or blocks_for(bits, rows, multiprocessors_of(device))
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, scales, codebook)], rows, x.shape[1])
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out, factor)]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, x.dtype is torch.bfloat16, bits)
        kernel(min(ceil_div(rows, ROWS), multiprocessors_of(device)), 32 * blocks.wr * blocks.wk, [weight, *pointers])
    return out
