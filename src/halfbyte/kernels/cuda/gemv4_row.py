"""`cuda/row4.cu`: GEMV of one or two rows with a 4-bit weight, on tensor cores."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.gemv4 import add_term, linear_blockwise4
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Image, Kernel, cubin, remembered
from .gemv4 import Nested, Term, Weight, mma_obstacle, weight_of

BATCH, ROWS = 2, 16  # rows of x at most; rows of W in a tile, of which W must have one


class Blocks(NamedTuple):
    """Constants of `cuda/mma_gemv.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


def blocks_for(rows: int, multiprocessors: int) -> Blocks:
    """As many groups as a multiprocessor has tiles, so that they all run at once; 8 at most."""
    groups = min(power_of_2(ceil_div(ceil_div(rows, ROWS), multiprocessors)), 8)
    return Blocks(1, groups, 16 // groups)


def image(blocks: Blocks, device: int, batch: int, bf16: bool, nested: bool, blocksize: int) -> Image:
    """`row4.cu`, compiled."""
    constants = dict(zip(("RT", "WR", "WK"), blocks, strict=True)) | {"BATCH": batch, "BF16": int(bf16)}
    constants |= {"NESTED": int(nested), "SHIFT": (blocksize // 32).bit_length() - 1, "ORIGIN": origin_of(device)}
    return cubin("row4", device_at(device).capability, constants, [Weight])


@remembered
def _kernel(blocks: Blocks, device: int, batch: int, bf16: bool, nested: bool, blocksize: int) -> Kernel:
    return Kernel(image(blocks, device, batch, bf16, nested, blocksize), "row4")


def obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int, *_: Any
) -> str | None:
    if not 1 <= x.shape[0] <= BATCH or rows < ROWS:
        return "takes 1 or 2 rows, and N from 16"
    if x.shape[1] % blocksize or packed.numel() >= 2**33:
        return "needs whole blocks a row, and less than 2^33 bytes"
    return mma_obstacle(x, packed, absmax)


@linear_blockwise4.kernel("cuda", unless=obstacle, rank=1)
def gemv(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: Term = None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    x, device, batch = x.contiguous(), x.get_device(), x.shape[0]
    blocks = blocks or blocks_for(rows, multiprocessors_of(device))
    weight = weight_of(x, packed, absmax, nested, quant_type, rows)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out)]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, batch, x.dtype is torch.bfloat16, nested is not None, blocksize)
        grid = min(ceil_div(rows, ROWS), multiprocessors_of(device))
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *pointers])
    return add_term(out, term)
