"""Triton: sums of products over rows, and products of rows with numbers.

A program sums one block of rows and columns, and torch adds the blocks of rows. On an H200, torch's `mul` of a matrix
with a broadcast operand of another dtype takes five times as long as its bytes do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import dora as ops
from ..tiling import ceil_div
from .launch import Launcher

ROWS = 256  # rows that a program sums
STEP = 16  # rows of an iteration
COLUMNS = 128
BLOCK = 2048  # values of a row that a program scales


@triton.jit
def _column_dots(
    a_ptr, b_ptr, out_ptr, rows, columns, a_stride, b_stride,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    block_row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for first in range(0, ROWS, STEP):
        row = (block_row * ROWS + first + tl.arange(0, STEP)).to(tl.int64)
        mask = (row < rows)[:, None] & (col < columns)[None, :]
        a = tl.load(a_ptr + row[:, None] * a_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row[:, None] * b_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out_ptr + block_row * columns + col, tl.sum(total, axis=0), mask=col < columns)


@triton.jit
def _scale_rows(x_ptr, by_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + col, mask=col < columns).to(tl.float32)
    tl.store(out_ptr + row * columns + col, x * tl.load(by_ptr + row).to(tl.float32), mask=col < columns)


_dots_launcher = Launcher(_column_dots)
_scale_launcher = Launcher(_scale_rows)


@ops.column_dots.kernel("cuda", "xpu")
def column_dots(a: Tensor, b: Tensor) -> Tensor:
    rows, columns = a.shape
    sums = a.new_empty(ceil_div(rows, ROWS), columns, dtype=torch.float32)
    if sums.numel():
        numbers = rows, columns, a.stride(0), b.stride(0)
        _dots_launcher(len(sums) * ceil_div(columns, COLUMNS), (a, b, sums), numbers, (ROWS, STEP, COLUMNS), warps=4)
    return sums.sum(0)


@ops.scale_rows.kernel("cuda", "xpu")
def scale_rows(matrix: Tensor, by: Tensor, out: Tensor) -> Tensor:
    if matrix.numel():
        rows, columns = matrix.shape
        _scale_launcher(rows * ceil_div(columns, BLOCK), (matrix, by, out), (columns,), (BLOCK,), warps=4)
    return out
