"""Triton: routing of tokens to experts, sums over an expert's rows, gated units, and combination of the outputs.

Sorting first counts how many slots of each block go to each expert. Cumulative counts in order of expert and block give
the first row of each block, and a second pass places the slots. A slot's position within its block is the number of
earlier slots with the same expert, so equal runs give equal orders and no two programs write to one place. The few
slots of a decoding step are sorted by one program, which compares all pairs: one launch instead of about seven.

The gated unit's backward, with the routing weight's gradient, reads z and c and overwrites them with h and dc: 12 bytes
per value of h in 16 bits. A program computes entire rows, since ⟨z, h⟩ is a sum over a row.

The router of a decoding step has few tokens and takes two launches instead of about eight. A program of the first
computes one logit, so that all of the router's weights are loaded concurrently. A program of the second has one token
and one warp, which needs no barriers for its maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import experts as reference
from ...ops.experts import Routing, Unit
from ..operands import copy_back
from ..tiling import ceil_div, power_of_2
from .glu import activation_and_derivative
from .launch import Launcher

SLOTS = 128  # slots that a program sorts
ENTRIES = 32  # entries of the table of tiles that a program writes
COLUMNS = 1024  # columns of a token's row that a program combines
TILE_ROWS = (16, 32, 64, 128)
FEW = 1 << 12  # comparisons that one program makes in 4 µs; with four times as many it spills registers


@triton.jit
def _count(index_ptr, counts_ptr, slots, blocks, experts, SLOTS: tl.constexpr, EXPERTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    # Slots after the end go to a bin that is not read.
    expert = tl.load(index_ptr + slot, mask=slot < slots, other=EXPERTS - 1).to(tl.int32)
    counts = tl.histogram(expert, EXPERTS)
    e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + 1 + e * blocks + tl.program_id(0), counts, mask=e < experts)


@triton.jit
def _place(index_ptr, begins_ptr, order_ptr, row_ptr, slots, blocks, SLOTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    mask = slot < slots
    expert = tl.load(index_ptr + slot, mask=mask, other=-1).to(tl.int32)
    neighbour = tl.load(index_ptr + slot, mask=mask, other=-1).to(tl.int32)
    lane = tl.arange(0, SLOTS)
    same_expert = expert[:, None] == neighbour[None, :]
    earlier = tl.sum((same_expert & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
    row = tl.load(begins_ptr + expert * blocks + tl.program_id(0), mask=mask, other=0) + earlier
    tl.store(row_ptr + slot, row, mask=mask)
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
    expert_start = tl.max(tl.where(passed, ends[None, :], 0), axis=1)
    in_table = entry < entries
    first = tl.load(offset_ptr + expert, mask=in_table, other=0) + (entry - expert_start) * ROWS
    tl.store(tile_ptr + 2 * entry, expert, mask=in_table)
    tl.store(tile_ptr + 2 * entry + 1, first, mask=in_table)


@triton.jit
def _route_few(
    index_ptr, order_ptr, row_ptr, offset_ptr, tile_ptr, slots, entries, experts,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Compute all results of `route` in one program; the table of tiles has at most as many entries as slots."""
    s = tl.arange(0, SLOTS)
    e = tl.arange(0, EXPERTS)
    expert = tl.load(index_ptr + s, mask=s < slots, other=EXPERTS).to(tl.int32)  # slots after the end sort last
    neighbour = tl.load(index_ptr + s, mask=s < slots, other=EXPERTS).to(tl.int32)
    precedes = (neighbour[None, :] < expert[:, None]) | (
        (neighbour[None, :] == expert[:, None]) & (s[None, :] < s[:, None])
    )
    row = tl.sum(precedes.to(tl.int32), axis=1)
    tl.store(row_ptr + s, row, mask=s < slots)
    tl.store(order_ptr + row, s, mask=s < slots)
    begins = tl.sum((neighbour[None, :] < e[:, None]).to(tl.int32), axis=1)
    until = tl.sum((neighbour[None, :] <= e[:, None]).to(tl.int32), axis=1)
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
    rows_ptr, row_ptr, weight_ptr, out_ptr, width,
    SORTED: tl.constexpr, WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    token = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(TOP_K):
        row = (token * TOP_K + j).to(tl.int64)
        if SORTED:
            row = tl.load(row_ptr + row).to(tl.int64)
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
    offsets = (expert.to(tl.int64) * width + col.to(tl.int64))[:, None] * RANK + r[None, :]
    mask = (col < width)[:, None] & (r < RANK)[None, :]
    tl.store(out_ptr + offsets, (acc * alpha).to(out_ptr.dtype.element_ty), mask=mask)


_count_launcher = Launcher(_count)
_place_launcher = Launcher(_place)
_tiles_launcher = Launcher(_tiles)
_few_launcher = Launcher(_route_few)
_combine_launcher, _outer_launcher = Launcher(_combine), Launcher(_outer)


def tile_rows(slots: int, experts: int) -> int:
    """Rows of a tile: the smallest size above an expert's average rows; 128 for more than 64 rows."""
    *small, largest = TILE_ROWS
    return next(
        (rows for rows in small if rows * experts > slots), small[-1] if slots <= small[-1] * experts else largest
    )


@reference.route.kernel("cuda", "xpu")
def route(index: Tensor, experts: int, rows: int | None = None) -> Routing:
    reference.check_index(index)
    index = index.contiguous()
    top_k = index.shape[1]
    slots = index.numel()
    blocks, bins = max(ceil_div(slots, SLOTS), 1), max(power_of_2(experts + 1), 32)
    order, row_of_slot = (torch.empty(slots, dtype=torch.int32, device=index.device) for _ in range(2))
    rows = rows or tile_rows(slots, experts)
    entries = min(slots, slots // rows + experts)
    tiles = torch.empty(entries, 2, dtype=torch.int32, device=index.device)
    if 0 < max(power_of_2(slots), 16) * bins <= FEW:
        offsets = torch.empty(experts + 1, dtype=torch.int32, device=index.device)
        _few_launcher(
            1, (index, order, row_of_slot, offsets, tiles), (slots, entries, experts),
            (rows, max(power_of_2(slots), 16), bins), warps=8,
        )  # fmt: skip
        return Routing(order, row_of_slot, offsets, tiles, rows, top_k)
    counts = torch.zeros(experts * blocks + 1, dtype=torch.int32, device=index.device)
    if slots:
        _count_launcher(blocks, (index, counts), (slots, blocks, experts), (SLOTS, bins), warps=4)
    begins = torch.cumsum(counts, 0, dtype=torch.int32)  # exclusive, since the first count is zero
    offsets = begins[::blocks].contiguous()
    if slots:
        _place_launcher(blocks, (index, begins, order, row_of_slot), (slots, blocks), (SLOTS,), warps=4)
        _tiles_launcher(
            ceil_div(entries, ENTRIES), (offsets, tiles), (entries, experts),
            (rows, ENTRIES, max(power_of_2(experts), 2)), warps=4,
        )  # fmt: skip
    return Routing(order, row_of_slot, offsets, tiles, rows, top_k)


@reference.combine.kernel("cuda", "xpu")
def combine(rows: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    return combine_slots(rows, routing.row_of_slot, routing.top_k, weights)


def combine_slots(rows: Tensor, row_of_slot: Tensor | None, top_k: int, weights: Tensor | None) -> Tensor:
    """`combine` of rows that are in the order of slots if `row_of_slot` is None."""
    rows, tokens = rows.contiguous(), rows.shape[0] // top_k
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        _combine_launcher(
            tokens * ceil_div(rows.shape[1], COLUMNS),
            (rows, rows if row_of_slot is None else row_of_slot, rows if weights is None else weights.contiguous(),
             out),
            (rows.shape[1],),
            (row_of_slot is not None, weights is not None, top_k, COLUMNS),
            warps=4,
        )  # fmt: skip
    return out


@reference.grouped_outer.kernel("cuda", "xpu")
def grouped_outer(
    wide: Tensor, narrow: Tensor, routing: Routing, gather: bool, alpha: float, dtype: torch.dtype
) -> Tensor:
    experts = routing.offsets.numel() - 1
    rank = narrow.shape[1]
    width = wide.shape[1]
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


UNIT_BLOCK = 1024  # values of a row at a time
UNIT_WARPS = 4


@triton.jit
def _load_unit(c_ptr, row, col, width, STEP: tl.constexpr):
    """gate and up in fp32, and their pointers."""
    distance = width if STEP == 1 else 1
    gates = c_ptr + row * 2 * width + col * STEP
    ups = gates + distance
    g = tl.load(gates, mask=col < width, other=0.0).to(tl.float32)
    u = tl.load(ups, mask=col < width, other=0.0).to(tl.float32)
    return g, u, gates, ups


@triton.jit
def activate_unit(g, u, limit, alpha, offset, ACTIVATION: tl.constexpr):
    """a(g), a′(g) and u + offset; NaN is preserved."""
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    activated, derivative = activation_and_derivative(g * alpha, ACTIVATION)
    return activated / alpha, derivative, u + offset


@triton.jit
def _unit(
    c_ptr, out_ptr, width, limit, alpha, offset, STEP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    g, u, _, _ = _load_unit(c_ptr, row, col, width, STEP)
    activated, _, shifted = activate_unit(g, u, limit, alpha, offset, ACTIVATION)
    tl.store(out_ptr + row * width + col, (activated * shifted).to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _unit_backward(
    z_ptr, c_ptr, weight_ptr, order_ptr, out_ptr, width, limit, alpha, offset,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weight_ptr + slot)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < width
        g, u, gates, ups = _load_unit(c_ptr, row, col, width, STEP)
        z = tl.load(z_ptr + row * width + col, mask=mask, other=0.0).to(tl.float32)
        activated, derivative, shifted = activate_unit(g, u, limit, alpha, offset, ACTIVATION)
        h = (activated * shifted).to(z_ptr.dtype.element_ty)
        total += z * h.to(tl.float32)
        dh = z * weight
        d_gate = tl.where(g > limit, 0.0, dh * shifted * derivative)
        d_up = tl.where(tl.abs(u) > limit, 0.0, dh * activated)
        tl.store(gates, d_gate.to(c_ptr.dtype.element_ty), mask=mask)
        tl.store(ups, d_up.to(c_ptr.dtype.element_ty), mask=mask)
        tl.store(z_ptr + row * width + col, h, mask=mask)
    tl.store(out_ptr + slot, tl.sum(total, axis=0))


_unit_launcher, _unit_backward_launcher = Launcher(_unit), Launcher(_unit_backward)


def _unit_constants(unit: Unit, width: int) -> tuple:
    return 2 if unit.interleaved else 1, unit.activation, min(UNIT_BLOCK, max(power_of_2(width), 32))


@reference.expert_unit.kernel("cuda", "xpu")
def expert_unit(c: Tensor, unit: Unit) -> Tensor:
    reference.check_unit(c, unit)
    rows, width = c.shape[0], c.shape[1] // 2
    out = torch.empty(rows, width, dtype=c.dtype, device=c.device)
    constants = _unit_constants(unit, width)
    if out.numel():
        _unit_launcher(
            rows * ceil_div(width, constants[-1]), (c, out), (width, unit.limit, unit.alpha, unit.offset), constants,
            UNIT_WARPS,
        )  # fmt: skip
    return out


@reference.expert_unit_backward_.kernel("cuda", "xpu")
def expert_unit_backward_(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> Tensor:
    reference.check_unit(c, unit)
    rows, width = z.shape
    out = torch.empty_like(weights)
    if z.numel():
        _unit_backward_launcher(
            rows, (z, c, weights, order, out), (width, unit.limit, unit.alpha, unit.offset),
            _unit_constants(unit, width), UNIT_WARPS,
        )  # fmt: skip
        copy_back((z, c), (z, c))
    return out


ROUTER_TOKENS, ROUTER_EXPERTS = 8, 512  # the most supported
ROUTER_BLOCK = 4096  # elements of K per iteration


@triton.jit
def _router_logits(x_ptr, weight_ptr, out_ptr, experts, columns, BLOCK: tl.constexpr):
    token = tl.program_id(0) // experts
    expert = tl.program_id(0) % experts
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * columns + col, mask=col < columns, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + expert * columns + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * experts + expert, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit
def _choose_experts(
    logits_ptr, score_ptr, index_ptr, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * experts + e, mask=e < experts, other=-float("inf")).to(tl.float32)
    p = tl.exp(logits - tl.max(logits, axis=0))
    p = p / tl.sum(p, axis=0)
    # Select one at a time by a key that grows with p and, for equal p, prefers the smaller expert.
    bits = p.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # clear the sign, so that NaN is above the padding's -1
    key = tl.where(e < experts, (bits.to(tl.int64) << 32) | (EXPERTS - 1 - e), -1)
    j = tl.arange(0, CHOSEN)
    scores = tl.zeros((CHOSEN,), tl.float32)
    index = tl.zeros((CHOSEN,), tl.int64)
    for at in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, -1, key)
        scores = tl.where(j == at, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), scores)
        index = tl.where(j == at, EXPERTS - 1 - (best & 0xFFFFFFFF), index)
    if NORMALIZED:
        scores = scores / tl.sum(scores, axis=0)
    tl.store(score_ptr + token * TOP_K + j, scores.to(score_ptr.dtype.element_ty), mask=j < TOP_K)
    tl.store(index_ptr + token * TOP_K + j, index, mask=j < TOP_K)


_router_launcher, _choose_launcher = Launcher(_router_logits), Launcher(_choose_experts)


def router_obstacle(x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype) -> str | None:
    if not 0 < x.shape[0] <= ROUTER_TOKENS or weight.shape[0] > ROUTER_EXPERTS:
        return f"takes up to {ROUTER_TOKENS} tokens and {ROUTER_EXPERTS} experts"
    return None if weight.dtype is x.dtype else "takes weights in x's dtype"


@reference.top_experts.kernel("cuda", "xpu", unless=router_obstacle)
def top_experts(
    x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x = x.contiguous()
    weight = weight.contiguous()
    tokens = x.shape[0]
    (experts, columns) = weight.shape
    logits = torch.empty(tokens, experts, dtype=x.dtype, device=x.device)
    scores = torch.empty(tokens, top_k, dtype=dtype, device=x.device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    block = min(ROUTER_BLOCK, max(power_of_2(columns), 32))
    _router_launcher(tokens * experts, (x, weight, logits), (experts, columns), (block,), warps=4)
    _choose_launcher(
        tokens, (logits, scores, index), (experts,),
        (top_k, normalized, max(power_of_2(experts), 32), max(power_of_2(top_k), 2)), warps=1,
    )  # fmt: skip
    return logits, scores, index
