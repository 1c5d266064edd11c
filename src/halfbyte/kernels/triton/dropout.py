"""Triton: dropout masks from a seed and an element's position (`ops.dropout`), and dropout itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.dropout import Dropout
from ...ops.dropout import drop as reference
from ..tiling import ceil_div
from .launch import Launcher

ROWS, COLUMNS = 16, 256


@triton.jit
def _fmix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_keys(seed_ptr, row):
    """Both keys of the mask's rows, uint32."""
    seed = tl.load(seed_ptr)
    first = _fmix(row.to(tl.uint32) + _fmix(seed.to(tl.uint32)))
    return first, first * 0x9E3779B9 + _fmix((seed >> 32).to(tl.uint32))


@triton.jit
def kept(first_key, second_key, column, threshold):
    """Bool [rows, columns]; `column` counts from the mask's first one, `threshold` is a uint32."""
    h = (column.to(tl.uint32)[None, :] ^ first_key[:, None]) * 0x7FEB352D
    return (h ^ (h >> 15) ^ second_key[:, None]) * 0x846CA68B >= threshold


@triton.jit
def _drop(
    x_ptr, row_ptr, seed_ptr, out_ptr, rows, columns, x_stride, first_column, threshold, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(columns, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask_row = tl.load(row_ptr + row, mask=row < rows, other=0) if GATHER else row
    first_key, second_key = row_keys(seed_ptr, mask_row)
    inside = (row < rows)[:, None] & (col < columns)[None, :]
    at = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + at * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    x = tl.where(kept(first_key, second_key, col + first_column, threshold.to(tl.uint32)), x, 0.0)
    tl.store(out_ptr + at * columns + col[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)


_launcher = Launcher(_drop)


@reference.kernel("cuda", "xpu", unless=lambda x, *_: "takes no fp64" if x.dtype is torch.float64 else None)
def drop(x: Tensor, dropout: Dropout, rows: Tensor | None = None) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        count, columns = x.shape
        tensors = x, dropout.seeds if rows is None else rows, dropout.seeds, out
        numbers = count, columns, x.stride(0), dropout.first_column, dropout.threshold, dropout.scale
        programs = ceil_div(count, ROWS) * ceil_div(columns, COLUMNS)
        _launcher(programs, tensors, numbers, (ROWS, COLUMNS, rows is not None), warps=4)
    return out
