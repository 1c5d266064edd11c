"""Triton: attention over pages in decoding; a program has one key head of one row, and all queries that share it.

Few rows leave multiprocessors idle, so a row's pages are split over several programs, whose sums a second launch joins
(Dao et al. 2023, "Flash-Decoding"). The split follows from the number of rows and the size of the tables alone: a
captured graph holds for rows of every length.

Pages that a bundle of rows begins with are read once for the bundle, by a launch before: its queries are the rows of
one tile (Juravsky et al. 2024, arXiv:2402.05099, section 3.2). Each row goes on from what it found there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.float8 import FP8_MAX
from ...ops.paged_attention import BUNDLE, PAGE, Shared, paged_attention, store_paged
from ..device import Device, device_of
from ..tiling import power_of_2
from .cached_attention import attend_tile, begun, conversion_obstacle, readable, rescaled, slots_of
from .float8 import to_float8
from .launch import Launcher

AMPERE = (8, 0)
MOST_SPLITS = 32
WAVES = 2  # programs for each multiprocessor, at least, where rows are long enough
WIDEST = 128  # queries of a bundle's tile, for which there are registers
USUAL = 8  # rows of a bundle, which the number of programs is chosen for
MOST_PARTS = 8  # of a bundle's pages, each of which a row's programs add up


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, sinks_ptr, out_ptr, top_ptr, total_ptr,
    common_ptr, begun_ptr, begun_top_ptr, begun_total_ptr, q_stride, stride, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """PARTS: that `_share` has made of each row's first pages, of which common_ptr has the number; 0: none."""
    program = tl.program_id(0).to(tl.int64)
    pair, split = program // SPLITS, program % SPLITS
    row, head = pair // HEADS, pair % HEADS
    g, d, s = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    at = (head * GROUP + g[:, None]) * size + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < size)
    q = tl.load(q_ptr + row * q_stride + at, mask=inside, other=0.0)
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    top, total = begun(sinks_ptr + head * GROUP + g, g < GROUP, split == 0, ROWS, SINKS)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    if PARTS > 0:
        common = tl.load(common_ptr + row)
        first = tl.maximum(first, common * PAGE)
        read = (g < GROUP) & (common > 0) & (split == 0)
        for p in tl.static_range(PARTS):
            part = (pair * GROUP + g) * PARTS + p
            its = tl.load(begun_top_ptr + part, mask=read, other=-float("inf"))
            sums = tl.load(begun_ptr + part[:, None] * size + d[None, :], mask=read[:, None] & inside, other=0.0)
            higher = tl.maximum(top, its)
            fade, new = rescaled(top, higher), rescaled(its, higher)
            acc = acc * fade[:, None] + sums * new[:, None]
            total = total * fade + tl.load(begun_total_ptr + part, mask=read, other=0.0) * new
            top = higher
    tiles_from, tiles_to = first // SLOTS, tl.cdiv(length, SLOTS)
    each = tl.cdiv(tiles_to - tiles_from, SPLITS)
    begin = tiles_from + split.to(tl.int32) * each
    end = tl.minimum(begin + each, tiles_to)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = tile * SLOTS
        page = tl.load(tables_ptr + row * stride + start // PAGE).to(tl.int64)
        slot = start + s
        used = (slot >= first) & (slot < length)
        where = ((page * HEADS + head) * PAGE + start % PAGE + s[:, None]) * size + d[None, :]
        mask = used[:, None] & (d[None, :] < size)
        top, total, acc = attend_tile(
            top, total, acc, q, keys_ptr + where, values_ptr + where, mask, used[None, :], scale, softcap, SOFTCAP
        )
    if SPLITS == 1:
        out = row * HEADS * GROUP * size + at
        tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:  # a program without a tile has seen nothing: top is -inf, and all else 0
        part = (pair * GROUP + g) * SPLITS + split
        tl.store(out_ptr + part[:, None] * size + d[None, :], acc, mask=inside)
        tl.store(top_ptr + part, top, mask=g < GROUP)
        tl.store(total_ptr + part, total, mask=g < GROUP)


@triton.jit
def _share(
    q_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, bundles_ptr, sums_ptr, top_ptr, total_ptr,
    q_stride, stride, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """A part of the pages that a bundle's rows begin with, for one key head and all queries of theirs."""
    program = tl.program_id(0).to(tl.int64)
    pair, p = program // PARTS, program % PARTS
    bundle, head = pair // HEADS, pair % HEADS
    begin = tl.load(bundles_ptr + bundle * 3).to(tl.int64)
    count, pages = tl.load(bundles_ptr + bundle * 3 + 1), tl.load(bundles_ptr + bundle * 3 + 2)
    m, d, s = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    row, query = begin + m // GROUP, head * GROUP + m % GROUP
    there = m // GROUP < count
    inside = there[:, None] & (d[None, :] < size)
    q = tl.load(q_ptr + row[:, None] * q_stride + query[:, None] * size + d[None, :], mask=inside, other=0.0)
    first = tl.zeros((ROWS,), tl.int32)
    tiles_from, tiles_to = 0, pages * (PAGE // SLOTS)
    if WINDOW > 0:
        first = tl.maximum(tl.load(lengths_ptr + row, mask=there, other=0) - WINDOW, 0)
        tiles_from = tl.min(tl.where(there, first, pages * PAGE), axis=0) // SLOTS
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    each = tl.cdiv(tiles_to - tiles_from, PARTS)
    start_tile = tiles_from + p.to(tl.int32) * each
    for tile in tl.range(start_tile, tl.minimum(start_tile + each, tiles_to), num_stages=STAGES):
        start = tile * SLOTS
        page = tl.load(tables_ptr + begin * stride + start // PAGE).to(tl.int64)
        where = ((page * HEADS + head) * PAGE + start % PAGE + s[:, None]) * size + d[None, :]
        mask = (s[:, None] >= 0) & (d[None, :] < size)
        seen = (start + s)[None, :] >= first[:, None]
        top, total, acc = attend_tile(
            top, total, acc, q, keys_ptr + where, values_ptr + where, mask, seen, scale, softcap, SOFTCAP
        )
    part = (row * HEADS * GROUP + query) * PARTS + p
    tl.store(sums_ptr + part[:, None] * size + d[None, :], acc, mask=inside)
    tl.store(top_ptr + part, top, mask=there)
    tl.store(total_ptr + part, total, mask=there)


@triton.jit
def _join(parts_ptr, top_ptr, total_ptr, out_ptr, size, SIZE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    p, d = tl.arange(0, PADDED), tl.arange(0, SIZE)
    there = p < SPLITS
    top = tl.load(top_ptr + query * SPLITS + p, mask=there, other=-float("inf"))
    total = tl.load(total_ptr + query * SPLITS + p, mask=there, other=0.0)
    weights = tl.exp(top - tl.max(top, axis=0))
    where = (query * SPLITS + p[:, None]) * size + d[None, :]
    parts = tl.load(parts_ptr + where, mask=there[:, None] & (d[None, :] < size), other=0.0)
    out = tl.sum(parts * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
    tl.store(out_ptr + query * size + d, out.to(out_ptr.dtype.element_ty), mask=d < size)


@triton.jit
def _store(
    k_ptr, v_ptr, pages_ptr, slots_ptr, keys_ptr, values_ptr, k_stride, k_head, v_stride, v_head, size,
    HEADS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A token's keys and values. LIMIT: of FP8; 0 for other caches."""
    token = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, PADDED)[:, None], tl.arange(0, SIZE)[None, :]
    inside = (h < HEADS) & (d < size)
    to = ((tl.load(pages_ptr + token) * HEADS + h) * PAGE + tl.load(slots_ptr + token)) * size + d
    k = tl.load(k_ptr + token * k_stride + h * k_head + d, mask=inside, other=0.0)
    v = tl.load(v_ptr + token * v_stride + h * v_head + d, mask=inside, other=0.0)
    if LIMIT > 0:
        k, v = to_float8(k.to(tl.float32), 1.0, LIMIT), to_float8(v.to(tl.float32), 1.0, LIMIT)
    tl.store(keys_ptr + to, k.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + to, v.to(values_ptr.dtype.element_ty), mask=inside)


_attender, _sharer, _joiner, _storer = map(Launcher, (_attend, _share, _join, _store))


def splits_of(device: Device, programs: int, pages: int, waves: int = WAVES) -> int:
    """Parts of a row's pages, of which there are at most `pages`, where whole rows are so many programs."""
    wanted = -(-waves * device.multiprocessors // max(programs, 1))
    return max(1, min(wanted, pages, MOST_SPLITS))


def _takes_bundles(q: Tensor, group: int) -> bool:
    """Whether there are tensor cores for a tile of so many queries, and room for it; else each row reads by itself."""
    device = device_of(q)
    cores = q.element_size() == 2 and (device.kind == "cpu" or device.at_least(AMPERE))  # a CPU's are the interpreter's
    return cores and power_of_2(BUNDLE * group) <= WIDEST


def _partial(queries: int, parts: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [queries, parts, D], maxima and sums of weights [queries, parts] in fp32, for a launch to write."""
    sums = q.new_empty(queries, parts, q.shape[2], dtype=torch.float32)
    return sums, sums.new_empty(queries, parts), sums.new_empty(queries, parts)


@paged_attention.kernel("cuda", "xpu")
def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    rows, heads, size = q.shape
    keys, values = readable(keys, values)
    key_heads, device = keys.shape[1], device_of(q)
    group, padded = heads // key_heads, max(power_of_2(size), 16)
    q = q if q.stride()[1:] == (size, 1) else q.contiguous()
    numbers = q.stride(0), tables.stride(0), size, scale, softcap or 1.0
    options = window or 0, softcap is not None
    parts, before = 0, (lengths, q, lengths, lengths)  # not read where nothing is shared
    if shared is not None and _takes_bundles(q, group):
        parts = min(splits_of(device, rows // USUAL * key_heads, tables.shape[1], 1), MOST_PARTS)
        sums = _partial(rows * heads, parts, q)
        tile = max(power_of_2(BUNDLE * group), 16)
        _sharer(
            len(shared.bundles) * key_heads * parts,
            (q, keys, values, tables, lengths, shared.bundles, *sums),
            numbers,
            (key_heads, group, tile, padded, PAGE, *slots_of(device, padded, q.element_size(), tile), parts, *options),
            warps=4 if tile <= 64 else 8,
        )
        before = shared.pages, *sums
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    splits = splits_of(device, rows * key_heads, tables.shape[1])
    split = _partial(rows * heads, splits, q) if splits > 1 else (out, lengths, lengths)
    _attender(
        rows * key_heads * splits,
        (q, keys, values, tables, lengths, lengths if sinks is None else sinks, *split, *before),
        numbers,
        (key_heads, group, max(power_of_2(group), 16), padded, PAGE, *slots_of(device, padded, q.element_size()),
         splits, parts, *options, sinks is not None),
        warps=4,
    )  # fmt: skip
    if splits > 1:
        _joiner(rows * heads, (*split, out), (size,), (padded, splits, power_of_2(splits)), warps=4)
    return out


@store_paged.kernel("cuda", "xpu", unless=conversion_obstacle)
def store(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    tokens, heads, size = k.shape
    k, v = (each if each.stride(2) == 1 else each.contiguous() for each in (k, v))
    padded = power_of_2(heads), power_of_2(size)
    limit = FP8_MAX[keys.dtype] if keys.dtype.itemsize == 1 else 0.0
    _storer(
        tokens,
        (k, v, pages.contiguous(), slots.contiguous(), keys, values),
        (*k.stride()[:2], *v.stride()[:2], size),
        (heads, *padded, PAGE, limit),
        warps=min(max(padded[0] * padded[1] // 256, 1), 8),
    )
