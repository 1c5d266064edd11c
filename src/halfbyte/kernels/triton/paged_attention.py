"""Triton: attention over pages in decoding; a program has one key head of one row, and all queries that share it.

Few rows leave multiprocessors idle, so a row's pages are split over several programs, whose sums a second launch joins
(Dao et al. 2023, "Flash-Decoding"). The split follows from the number of rows and the size of the tables alone: a
captured graph holds for rows of every length. Rows with a common beginning read its pages once each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.paged_attention import PAGE, paged_attention
from ..device import Device, device_of
from ..tiling import power_of_2
from .decode_attention import CONVERTS, cached, slots_of
from .launch import Launcher

MOST_SPLITS = 32
WAVES = 2  # programs for each multiprocessor, at least, where rows are long enough


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, tables_ptr, lengths_ptr, out_ptr, top_ptr, total_ptr, stride, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    pair, split = program // SPLITS, program % SPLITS
    row, head = pair // HEADS, pair % HEADS
    g, d, s = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    at = (pair * GROUP + g[:, None]) * size + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < size)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    tiles_from, tiles_to = first // SLOTS, tl.cdiv(length, SLOTS)
    each = tl.cdiv(tiles_to - tiles_from, SPLITS)
    begin = tiles_from + split.to(tl.int32) * each
    end = tl.minimum(begin + each, tiles_to)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = tile * SLOTS
        page = tl.load(tables_ptr + row * stride + start // PAGE).to(tl.int64)
        slot = start + s
        used = (slot >= first) & (slot < length)
        where = ((page * HEADS + head) * PAGE + start % PAGE + s[:, None]) * size + d[None, :]
        mask = used[:, None] & (d[None, :] < size)
        k = cached(keys_ptr + where, mask).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            ratio = 2 / (1 + tl.exp(-2 * scores / softcap)) - 1  # tanh
            scores = softcap * ratio
        scores = tl.where(used[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        v = cached(values_ptr + where, mask).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weights, axis=1)
        top = higher
    if SPLITS == 1:
        tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:  # a program without a tile has seen nothing: top is -inf, and all else 0
        part = (pair * GROUP + g) * SPLITS + split
        tl.store(out_ptr + part[:, None] * size + d[None, :], acc, mask=inside)
        tl.store(top_ptr + part, top, mask=g < GROUP)
        tl.store(total_ptr + part, total, mask=g < GROUP)


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


_attender, _joiner = Launcher(_attend), Launcher(_join)


def splits_of(device: Device, programs: int, pages: int) -> int:
    """Parts of a row's pages, of which there are at most `pages`, where whole rows are so many programs."""
    wanted = -(-WAVES * device.multiprocessors // programs)
    return max(1, min(wanted, pages, MOST_SPLITS))


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
) -> Tensor:
    rows, heads, size = q.shape
    if keys.dtype is torch.float8_e4m3fn and not device_of(q).at_least(CONVERTS):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    key_heads = keys.shape[1]
    group, padded = heads // key_heads, max(power_of_2(size), 16)
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    splits = splits_of(device_of(q), rows * key_heads, tables.shape[1])
    parts, tops, totals = out, lengths, lengths  # not written where there is one part
    if splits > 1:
        parts = torch.empty(rows * heads, splits, size, dtype=torch.float32, device=q.device)
        tops, totals = (torch.empty(rows * heads, splits, dtype=torch.float32, device=q.device) for _ in range(2))
    slots, stages = slots_of(device_of(q), padded, q.element_size())
    _attender(
        rows * key_heads * splits,
        (q, keys, values, tables, lengths, parts, tops, totals),
        (tables.stride(0), size, scale, softcap or 1.0),
        (key_heads, group, max(power_of_2(group), 16), padded, PAGE, slots, stages, splits, window or 0,
         softcap is not None),
        warps=4,
    )  # fmt: skip
    if splits > 1:
        joined = (padded, splits, power_of_2(splits))
        _joiner(rows * heads, (parts, tops, totals, out), (size,), joined, warps=4)
    return out
