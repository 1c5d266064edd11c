"""Triton: the sorting of slots by expert, sums over an expert's rows, and what tokens get back.

Sorting counts first: blocks of slots count how many go to each expert, the counts' sums in order of expert and block
say where each block's begin, and a second look places them. A slot's place among those of its block is the number of
earlier ones with its expert: equal runs place alike, and no two programs write to one place. The few slots of a token
that is generated are sorted by one program, which compares each with each: one launch for some seven.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import experts as reference
from ...ops.experts import Routing
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

SLOTS = 128  # that a program sorts
ENTRIES = 32  # of the table of tiles that a program writes
COLUMNS = 1024  # of a token's row that a program adds up
TILE_ROWS = (16, 32, 64, 128)
FEW = 1 << 12  # comparisons of slots with experts that one program makes in 4 µs; four times as many spill registers


@triton.jit
def _count(index_ptr, counts_ptr, slots, blocks, experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    # What is beyond the end goes to a bin that nobody reads.
    expert = tl.load(index_ptr + slot, mask=slot < slots, other=EXPERTS - 1).to(tl.int32)
    counts = tl.histogram(expert, EXPERTS)
    e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + 1 + e * blocks + tl.program_id(0), counts, mask=e < experts)


@triton.jit
def _place(index_ptr, begins_ptr, order_ptr, place_ptr, slots, blocks, SLOTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    mask = slot < slots
    expert = tl.load(index_ptr + slot, mask=mask, other=-1).to(tl.int32)
    other = tl.load(index_ptr + slot, mask=mask, other=-1).to(tl.int32)
    here = tl.arange(0, SLOTS)
    alike = expert[:, None] == other[None, :]
    earlier = tl.sum((alike & (here[None, :] < here[:, None])).to(tl.int32), axis=1)
    row = tl.load(begins_ptr + expert * blocks + tl.program_id(0), mask=mask, other=0) + earlier
    tl.store(place_ptr + slot, row, mask=mask)
    tl.store(order_ptr + row, slot, mask=mask)


@triton.jit
def _tiles(
    offset_ptr, tile_ptr, entries, experts, ROWS: tl.constexpr, ENTRIES: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    e = tl.arange(0, EXPERTS)
    begins = tl.load(offset_ptr + e, mask=e < experts, other=0)
    count = tl.load(offset_ptr + e + 1, mask=e < experts, other=0) - begins
    ends = tl.cumsum((count + ROWS - 1) // ROWS, axis=0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    passed = (ends[None, :] <= entry[:, None]) & (e < experts)[None, :]
    expert = tl.sum(passed.to(tl.int32), axis=1)
    before = tl.max(tl.where(passed, ends[None, :], 0), axis=1)
    known = entry < entries
    first = tl.load(offset_ptr + expert, mask=known, other=0) + (entry - before) * ROWS
    tl.store(tile_ptr + 2 * entry, expert, mask=known)
    tl.store(tile_ptr + 2 * entry + 1, first, mask=known)


@triton.jit
def _route_few(
    index_ptr, order_ptr, place_ptr, offset_ptr, tile_ptr, slots, entries, experts,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """All that `route` makes; a table of tiles has no more entries than there are slots."""
    s = tl.arange(0, SLOTS)
    e = tl.arange(0, EXPERTS)
    expert = tl.load(index_ptr + s, mask=s < slots, other=EXPERTS).to(tl.int32)  # beyond the end: behind all
    other = tl.load(index_ptr + s, mask=s < slots, other=EXPERTS).to(tl.int32)
    before = (other[None, :] < expert[:, None]) | ((other[None, :] == expert[:, None]) & (s[None, :] < s[:, None]))
    place = tl.sum(before.to(tl.int32), axis=1)
    tl.store(place_ptr + s, place, mask=s < slots)
    tl.store(order_ptr + place, s, mask=s < slots)
    begins = tl.sum((other[None, :] < e[:, None]).to(tl.int32), axis=1)
    until = tl.sum((other[None, :] <= e[:, None]).to(tl.int32), axis=1)
    tl.store(offset_ptr + e, begins, mask=e <= experts)
    ends = tl.cumsum((until - begins + ROWS - 1) // ROWS, axis=0)
    passed = (ends[None, :] <= s[:, None]) & (e < experts)[None, :]
    of_entry = tl.sum(passed.to(tl.int32), axis=1)
    tiles_before = tl.max(tl.where(passed, ends[None, :], 0), axis=1)
    begin = tl.sum(tl.where(e[None, :] == of_entry[:, None], begins[None, :], 0), axis=1)
    tl.store(tile_ptr + 2 * s, of_entry, mask=s < entries)
    tl.store(tile_ptr + 2 * s + 1, begin + (s - tiles_before) * ROWS, mask=s < entries)


@triton.jit
def _combine(
    rows_ptr, place_ptr, weight_ptr, out_ptr, width, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    token = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(place_ptr + token * TOP_K + j).to(tl.int64)
        values = tl.load(rows_ptr + row * width + col, mask=col < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weight_ptr + token * TOP_K + j).to(tl.float32)
        total += values
    tl.store(out_ptr + token.to(tl.int64) * width + col, total.to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _outer(
    wide_ptr, narrow_ptr, order_ptr, offset_ptr, out_ptr, width, alpha,
    TOP_K: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    expert = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    r = tl.arange(0, PADDED)
    begin = tl.load(offset_ptr + expert)
    end = tl.load(offset_ptr + expert + 1)
    acc = tl.zeros((COLUMNS, PADDED), tl.float32)
    for step in tl.range(0, tl.cdiv(end - begin, ROWS), num_stages=STAGES):
        row = begin + step * ROWS + tl.arange(0, ROWS)
        live = row < end
        source = row
        if TOP_K > 0:
            source = tl.load(order_ptr + row, mask=live, other=0) // TOP_K
        wide = tl.load(
            wide_ptr + source.to(tl.int64)[:, None] * width + col[None, :],
            mask=live[:, None] & (col < width)[None, :], other=0.0,
        )  # fmt: skip
        narrow = tl.load(
            narrow_ptr + row.to(tl.int64)[:, None] * RANK + r[None, :],
            mask=live[:, None] & (r < RANK)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(tl.trans(wide), narrow, acc, input_precision="ieee")
    place = (expert.to(tl.int64) * width + col.to(tl.int64))[:, None] * RANK + r[None, :]
    mask = (col < width)[:, None] & (r < RANK)[None, :]
    tl.store(out_ptr + place, (acc * alpha).to(out_ptr.dtype.element_ty), mask=mask)


_count_launcher, _place_launcher, _tiles_launcher = Launcher(_count), Launcher(_place), Launcher(_tiles)
_few_launcher = Launcher(_route_few)
_combine_launcher, _outer_launcher = Launcher(_combine), Launcher(_outer)


def tile_rows(slots: int, experts: int) -> int:
    """Rows of a tile: more than an expert has on average, or half of them would need two; 128 from 65 on alone."""
    *few, most = TILE_ROWS
    return next((rows for rows in few if rows * experts > slots), few[-1] if slots <= few[-1] * experts else most)


@reference.route.kernel("cuda", "xpu")
def route(index: Tensor, experts: int, rows: int | None = None) -> Routing:
    reference.check_index(index)
    index, top_k, slots = index.contiguous(), index.shape[1], index.numel()
    blocks, bins = max(ceil_div(slots, SLOTS), 1), max(power_of_2(experts + 1), 32)
    order, place = (torch.empty(slots, dtype=torch.int32, device=index.device) for _ in range(2))
    rows = rows or tile_rows(slots, experts)
    entries = min(slots, slots // rows + experts)
    tiles = torch.empty(entries, 2, dtype=torch.int32, device=index.device)
    if 0 < max(power_of_2(slots), 16) * bins <= FEW:
        offsets = torch.empty(experts + 1, dtype=torch.int32, device=index.device)
        _few_launcher(
            1, (index, order, place, offsets, tiles), (slots, entries, experts),
            (rows, max(power_of_2(slots), 16), bins), warps=8,
        )  # fmt: skip
        return Routing(order, place, offsets, tiles, rows, top_k)
    counts = torch.zeros(experts * blocks + 1, dtype=torch.int32, device=index.device)
    if slots:
        _count_launcher(blocks, (index, counts), (slots, blocks, experts), (SLOTS, bins), warps=4)
    begins = torch.cumsum(counts, 0, dtype=torch.int32)  # the first count is a zero, so these come before each
    offsets = begins[::blocks].contiguous()
    if slots:
        _place_launcher(blocks, (index, begins, order, place), (slots, blocks), (SLOTS,), warps=4)
        _tiles_launcher(
            ceil_div(entries, ENTRIES), (offsets, tiles), (entries, experts),
            (rows, ENTRIES, max(power_of_2(experts), 2)), warps=4,
        )  # fmt: skip
    return Routing(order, place, offsets, tiles, rows, top_k)


@reference.combine.kernel("cuda", "xpu")
def combine(rows: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    rows, tokens = rows.contiguous(), rows.shape[0] // routing.top_k
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        _combine_launcher(
            tokens * ceil_div(rows.shape[1], COLUMNS),
            (rows, routing.place, rows if weights is None else weights.contiguous(), out),
            (rows.shape[1],),
            (weights is not None, routing.top_k, COLUMNS),
            warps=4,
        )
    return out


@reference.grouped_outer.kernel("cuda", "xpu")
def grouped_outer(
    wide: Tensor, narrow: Tensor, routing: Routing, gather: bool, alpha: float, dtype: torch.dtype
) -> Tensor:
    experts, rank, width = routing.offsets.numel() - 1, narrow.shape[1], wide.shape[1]
    out = torch.empty(experts, width, rank, dtype=dtype, device=wide.device)
    padded = max(power_of_2(rank), 16)
    columns = 128 if padded <= 32 else 64
    if out.numel():
        _outer_launcher(
            experts * ceil_div(width, columns),
            (wide.contiguous(), narrow.contiguous(), routing.order, routing.offsets, out),
            (width, alpha),
            (routing.top_k if gather else 0, rank, padded, 64 if wide.element_size() == 2 else 32, columns, 3),
            warps=4,
        )
    return out
