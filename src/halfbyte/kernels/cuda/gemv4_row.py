"""`cuda/row4.cu`: GEMV of one or two rows with a 4-bit weight, or with several weights at once, on tensor cores."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import linear_blockwise4
from ...formats.linear import add_term
from ...ops.decode import PackedLinear, packed_linears
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Image, Kernel, cubin, remembered
from .gemv4 import Nested, Term, Weight, mma_obstacle, weight_of

BATCH, ROWS = 2, 16  # most rows of x; rows of W per tile, at least one tile
PARTS = 3  # most weights per launch


class _Part(ctypes.Structure):
    """The struct `Part` of `cuda/row4.cu`."""

    _fields_ = (
        ("w", Weight),
        *((name, ctypes.c_void_p) for name in ("bias", "out")),
        *((name, ctypes.c_uint32) for name in ("begin", "blocks")),
    )


class _Parts(ctypes.Structure):
    """The struct `Parts` of `cuda/row4.cu`."""

    _fields_ = (("parts", _Part * PARTS),)


class Blocks(NamedTuple):
    """Constants of `cuda/mma_gemv.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


def blocks_for(rows: int, multiprocessors: int) -> Blocks:
    """One group per tile of a multiprocessor, at most 8, so that all tiles run concurrently."""
    groups = min(power_of_2(ceil_div(ceil_div(rows, ROWS), multiprocessors)), 8)
    return Blocks(1, groups, 16 // groups)


def image(blocks: Blocks, device: int, batch: int, bf16: bool, nested: bool, blocksize: int) -> Image:
    """Compile `row4.cu`."""
    constants = dict(zip(("RT", "WR", "WK"), blocks, strict=True)) | {"BATCH": batch, "BF16": int(bf16)}
    constants |= {"NESTED": int(nested), "SHIFT": (blocksize // 32).bit_length() - 1, "ORIGIN": origin_of(device)}
    return cubin("row4", device_at(device).capability, constants, [_Parts])


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
    bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    return _products(x.contiguous(), [(packed, absmax, nested, blocksize, quant_type, rows, bias)], blocks)[0]


def weights_obstacle(linears: Sequence[PackedLinear]) -> str | None:
    """Return why a launch cannot take the weights of these linears, or None."""
    if not 1 <= len(linears) <= PARTS or any(linear.product.op is not linear_blockwise4 for linear in linears):
        return f"takes 1 to {PARTS} weights in NF4 or FP4"
    layouts = {(nested is None, blocksize) for _, _, nested, blocksize, *_ in (p.product.arguments for p in linears)}
    return None if len(layouts) == 1 else "needs weights with one kind of scales"


def several_obstacle(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[Term]) -> str | None:
    refusals = (reason for linear in linears if (reason := obstacle(x, *linear.product.arguments)))
    return weights_obstacle(linears) or next(refusals, None)


@packed_linears.kernel("cuda", unless=several_obstacle)
def several(
    x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[Term], blocks: Blocks | None = None
) -> list[Tensor]:
    outs = _products(x.contiguous(), [(*linear.product.arguments, linear.bias) for linear in linears], blocks)
    return [add_term(out, term) for out, term in zip(outs, terms, strict=True)]


def shares(tiles: Sequence[int], blocks: int) -> list[int]:
    """Split at most `blocks` blocks among the weights in proportion to their tiles, at least one each."""
    blocks = min(blocks, sum(tiles))
    first = [max(1, count * blocks // sum(tiles)) for count in tiles]
    first[tiles.index(max(tiles))] += blocks - sum(first)
    return first


def _products(x: Tensor, weights: Sequence[tuple], blocks: Blocks | None) -> list[Tensor]:
    device = x.get_device()
    batch = x.shape[0]
    bf16 = x.dtype is torch.bfloat16
    all_rows = [weight[5] for weight in weights]
    blocks = blocks or blocks_for(sum(all_rows), multiprocessors_of(device))
    _, _, nested, blocksize, *_ = weights[0]
    outs = [torch.empty(batch, rows, dtype=x.dtype, device=x.device) for rows in all_rows]
    counts = shares([ceil_div(rows, ROWS) for rows in all_rows], multiprocessors_of(device))
    table = _Parts()
    for at in range(PARTS):
        table.parts[at].begin = sum(counts)
    begins = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    for at, (weight, begin, count) in enumerate(zip(weights, begins, counts, strict=True)):
        packed, absmax, of_scales, _, quant_type, rows, bias = weight
        weight_struct = weight_of(x, packed, absmax, of_scales, quant_type, rows)
        table.parts[at] = _Part(
            weight_struct, None if bias is None else bias.data_ptr(), outs[at].data_ptr(), begin, count
        )
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, batch, bf16, nested is not None, blocksize)
        kernel(sum(counts), 32 * blocks.wr * blocks.wk, [table, ctypes.c_void_p(x.data_ptr())])
    return outs
