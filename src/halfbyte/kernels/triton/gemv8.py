"""Triton: GEMV and small-batch GEMM with 8-bit weights, which are read once.

A code becomes a number by one conversion, which is exact in 16 bits, too. The bound is reading the weight, so enough
bytes must be in flight. Scales of rows and tensors multiply sums; scales of tiles multiply numbers or sums of 128
columns.

`_gemv`, one row of x: no tensor cores, sums in fp32. A program has a few rows of W. Its threads split K, 16 bytes of
each row per thread, with their values of x in registers for all these rows. With more rows of x every number would be
multiplied by every row: four take 59 µs on an H200 (4096×14336), where `_gemm` takes 25.

`_gemm`, up to `GEMM_ROWS` rows: tensor cores, with W as the left operand. Programs also split K, so that wide tiles,
which read x less often, fill the device; `_add` sums their fp32 results in a fixed order. For more rows, dequantizing
before a GEMM is faster.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import int8
from ...formats.float8 import TILE, Scaling, linear_float8
from ...formats.int8 import linear_int8
from ..tiling import ceil_div, power_of_2
from .float8 import float8_obstacle
from .launch import Launcher

GEMM_ROWS = 64
ADDED = 1024  # values that a program of `_add` sums
INVERSE_127 = tl.constexpr(int8.INVERSE_127)


class GemvBlocks(NamedTuple):
    """Rows of W per program, columns of each row per iteration, and warps."""

    rows: int
    columns: int
    warps: int


class GemmBlocks(NamedTuple):
    """Rows of W and columns of each per iteration, parts of K, and pipeline stages."""

    rows: int
    columns: int
    splits: int
    stages: int


def gemv_blocks(columns: int) -> GemvBlocks:
    """Blocks in which a warp has 512 columns of all rows: as many bytes in flight as registers hold."""
    wide = min(max(power_of_2(columns), 128), 2048)
    return GemvBlocks(4, wide, max(wide // 512, 1))


def gemm_blocks(rows: int, batch: int) -> GemmBlocks:
    """Best blocks for a weight of `rows` rows; K is split until there are about two programs per multiprocessor."""
    tile = 64 if batch <= 32 else 128
    return GemmBlocks(tile, 128, min(max(256 // ceil_div(rows, tile), 1), 8), 4)


@triton.jit
def _number(codes, INT8: tl.constexpr):
    """Convert E4M3 codes to fp16, or int8 codes to fp32; both are exact.

    int8 codes are added to the bits of 1.5 · 2^23: GPUs convert bytes at a quarter of the rate of additions.
    """
    if INT8:
        number = (codes.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    else:
        number = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return number


@triton.jit
def _row_scale(scale_ptr, row, rows, SCALING: tl.constexpr, INT8: tl.constexpr):
    """Factor of each row's sum, fp32 in the shape of `row`; 1 for tiles."""
    scale = tl.full(row.shape, 1.0, tl.float32)
    if SCALING == "row":
        scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)
    if SCALING == "tensor":
        scale *= tl.load(scale_ptr)
    if INT8:
        scale *= INVERSE_127
    return scale


@triton.jit
def _tile_scales(scale_ptr, row, rows, start, width, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Scales of tiles for columns from `start` on, fp32 [rows, COLUMNS], each read once per row."""
    tile = start // TILE + tl.arange(0, COLUMNS // TILE)
    first = row // TILE * tl.cdiv(width, TILE)
    inside = (row[:, None] < rows) & (tile[None, :] * TILE < width)
    scales = tl.load(scale_ptr + first[:, None] + tile[None, :], mask=inside, other=0.0)
    scales = tl.broadcast_to(scales[:, :, None], (row.shape[0], COLUMNS // TILE, TILE))
    return tl.reshape(scales, (row.shape[0], COLUMNS))


@triton.jit
def _gemv(
    codes_ptr, scale_ptr, x_ptr, bias_ptr, out_ptr, rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALING: tl.constexpr, INT8: tl.constexpr, TILE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = codes_ptr + row.to(tl.int64)[:, None] * width
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, COLUMNS):
        col = start + tl.arange(0, COLUMNS)
        mask = (row[:, None] < rows) & (col[None, :] < width)
        w = _number(tl.load(at + col[None, :], mask=mask, other=0), INT8).to(tl.float32)
        if SCALING == "tile":
            w *= _tile_scales(scale_ptr, row, rows, start, width, COLUMNS, TILE)
        acc += w * tl.load(x_ptr + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1) * _row_scale(scale_ptr, row, rows, SCALING, INT8)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _gemm(
    codes_ptr, scale_ptr, x_ptr, part_ptr, rows, width, batch, splits,
    M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SCALING: tl.constexpr, INT8: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    row, m = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, M)
    at = codes_ptr + row.to(tl.int64)[:, None] * width
    acc = tl.zeros((ROWS, M), tl.float32)
    steps = tl.cdiv(tl.cdiv(width, COLUMNS), splits)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        col = step * COLUMNS + tl.arange(0, COLUMNS)
        codes = tl.load(at + col[None, :], mask=(row[:, None] < rows) & (col[None, :] < width), other=0)
        inside = (m[None, :] < batch) & (col[:, None] < width)
        x = tl.load(x_ptr + m[None, :] * width + col[:, None], mask=inside, other=0.0)
        w = _number(codes, INT8).to(x.dtype)
        if SCALING == "tile":  # rows and columns of an iteration are within one tile
            first = tile * ROWS // TILE * tl.cdiv(width, TILE)
            scale = tl.load(scale_ptr + first + step * COLUMNS // TILE, mask=step * COLUMNS < width, other=0.0)
            acc += tl.dot(w, x) * scale
        else:
            acc = tl.dot(w, x, acc)
    acc *= _row_scale(scale_ptr, row, rows, SCALING, INT8)[:, None]
    out = part_ptr + (split * batch + m[None, :]) * rows + row[:, None]
    tl.store(out, acc, mask=(row[:, None] < rows) & (m[None, :] < batch))


@triton.jit
def _add(part_ptr, bias_ptr, out_ptr, rows, numel, splits, BIAS: tl.constexpr, ADDED: tl.constexpr):
    at = tl.program_id(0) * ADDED + tl.arange(0, ADDED)
    total = tl.zeros((ADDED,), tl.float32)
    for split in range(splits):
        total += tl.load(part_ptr + split * numel + at, mask=at < numel, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % rows, mask=at < numel, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < numel)


_gemv_launcher = Launcher(_gemv)
_gemm_launcher = Launcher(_gemm)
_add_launcher = Launcher(_add)


def gemv(
    x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None, blocks: GemvBlocks | None = None
) -> Tensor:
    """Linear of one row; for int8 codes, `scale` is their rows' absmax."""
    x = x.contiguous()
    codes = codes.contiguous()
    scale = scale.contiguous()
    (batch, width), rows = x.shape, codes.shape[0]
    blocks = blocks or gemv_blocks(width)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    constants = (blocks.rows, blocks.columns, scaling, codes.dtype is torch.int8, TILE, bias is not None)
    tensors = (codes, scale, x, x if bias is None else bias, out)
    _gemv_launcher(ceil_div(rows, blocks.rows), tensors, (rows, width), constants, blocks.warps)
    return out


def gemm(
    x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None, blocks: GemmBlocks | None = None
) -> Tensor:
    """Linear on tensor cores, for up to `GEMM_ROWS` rows of 16 bits."""
    x = x.contiguous()
    codes = codes.contiguous()
    scale = scale.contiguous()
    (batch, width), rows = x.shape, codes.shape[0]
    blocks = blocks or gemm_blocks(rows, batch)
    partial = torch.empty(blocks.splits, batch, rows, dtype=torch.float32, device=x.device)
    _gemm_launcher(
        ceil_div(rows, blocks.rows) * blocks.splits,
        (codes, scale, x, partial),
        (rows, width, batch, blocks.splits),
        (max(power_of_2(batch), 16), blocks.rows, blocks.columns, scaling, codes.dtype is torch.int8, TILE,
         blocks.stages),
        warps=8 if blocks.rows >= 128 else 4,
    )  # fmt: skip
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    constants, numbers = (bias is not None, ADDED), (rows, out.numel(), blocks.splits)
    _add_launcher(ceil_div(out.numel(), ADDED), (partial, out if bias is None else bias, out), numbers, constants, 4)
    return out


def _gemv_obstacle(x: Tensor, codes: Tensor) -> str | None:
    return None if x.shape[0] == 1 and x.shape[1] * codes.shape[0] else "takes one row"


def _gemm_obstacle(x: Tensor, codes: Tensor) -> str | None:
    if not 0 < x.shape[0] <= GEMM_ROWS or not x.shape[1] * codes.shape[0] or x.dtype is torch.float32:
        return "takes 1 to 64 rows of 16 bits"
    return None


def float8_gemv_obstacle(x: Tensor, codes: Tensor, *_: Any) -> str | None:
    return _gemv_obstacle(x, codes) or float8_obstacle(x)


def float8_gemm_obstacle(x: Tensor, codes: Tensor, *_: Any) -> str | None:
    return _gemm_obstacle(x, codes) or float8_obstacle(x)


@linear_float8.kernel("cuda", "xpu", unless=float8_gemv_obstacle, rank=1)
def float8_gemv(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    return gemv(x, codes, scale, scaling, bias)


@linear_float8.kernel("cuda", "xpu", unless=float8_gemm_obstacle, rank=2)
def float8_gemm(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    return gemm(x, codes, scale, scaling, bias)


@linear_int8.kernel("cuda", "xpu", unless=lambda x, codes, *_: _gemv_obstacle(x, codes), rank=1)
def int8_gemv(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    return gemv(x, codes, absmax, "row", bias)


@linear_int8.kernel("cuda", "xpu", unless=lambda x, codes, *_: _gemm_obstacle(x, codes), rank=2)
def int8_gemm(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    return gemm(x, codes, absmax, "row", bias)
