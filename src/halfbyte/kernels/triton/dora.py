"""Triton: sums of products over rows. A program sums one block of rows and columns; torch adds the blocks of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.dora import column_dots as reference
from ..tiling import ceil_div
from .launch import Launcher

ROWS = 256  # rows that a program sums
STEP = 16  # rows of an iteration
COLUMNS = 128


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


_launcher = Launcher(_column_dots)


@reference.kernel("cuda", "xpu")
def column_dots(a: Tensor, b: Tensor) -> Tensor:
    rows, columns = a.shape
    sums = a.new_empty(ceil_div(rows, ROWS), columns, dtype=torch.float32)
    if sums.numel():
        numbers = rows, columns, a.stride(0), b.stride(0)
        _launcher(len(sums) * ceil_div(columns, COLUMNS), (a, b, sums), numbers, (ROWS, STEP, COLUMNS), warps=4)
    return sums.sum(0)
