"""Triton: the rows of partial sums that programs left are added, in order.

Few programs leave them, so this pass is short: a launch, and one look at what mostly still is in the L2 cache. No
atomics: equal runs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import partial_sums as reference
from ..tiling import ceil_div
from .launch import Launcher

TILE = 8192  # values a program reads at a time
WARPS = 8


@triton.jit
def _sum_rows(partial_ptr, out_ptr, rows, first, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    part = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    start = part * first
    end = tl.where(part == 0, first, rows)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(start, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (col < D)[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64)[:, None] * D + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + part * D + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < D)


_launcher = Launcher(_sum_rows)


@reference.sum_rows.kernel("cuda", "xpu")
def sum_rows(partials: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
    rows, width = partials.shape
    columns = 32 if width >= 2048 else 8  # 128 or 32 bytes of a row: enough programs for narrow rows, too
    parts = 1 if first is None else 2
    out = torch.empty(parts, width, dtype=dtype, device=partials.device)
    _launcher(
        parts * ceil_div(width, columns), (partials, out), (rows, rows if first is None else first),
        (width, TILE // columns, columns), WARPS,
    )  # fmt: skip
    return out
