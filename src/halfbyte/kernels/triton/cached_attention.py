"""Triton: decoding attention over a static cache and over pages, with a common loop over tiles and softmax.

A program computes all queries of one key head of one sequence. It iterates over tiles of keys and values with flash
attention's running maximum (Dao et al. 2022, arXiv:2205.14135, section 3.1); the queries fill the rows of a tensor
core's instruction. Over a static cache it reads only the slots in use, once.

With few sequences multiprocessors would be idle, so a sequence's pages are split over several programs, and a second
launch combines their sums (Dao et al. 2023, "Flash-Decoding"). The split depends only on the number of sequences and
the size of the tables: a captured graph serves sequences of every length.

Pages shared by a bundle of sequences are read once per bundle, by an earlier launch with the bundle's queries as one
tile (Juravsky et al. 2024, arXiv:2402.05099, section 3.2). Each sequence continues from these partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.float8 import FP8_MAX
from ...ops.decode import decode_attention, store_both_
from ...ops.paged_attention import BUNDLE, PAGE, Shared, paged_attention, store_paged
from ...ops.paged_attention4 import LARGEST, STEPS, Cache4, append4_, paged_attention4
from ..device import Device, device_of
from ..tiling import power_of_2
from .float8 import e4m3, to_float8
from .launch import Launcher

SLOTS = (64, 32, 16)  # cache slots that a program reads at a time: the most that fit, by `slots_of`
CONVERTS = (9, 0)  # first capability on which Triton converts E4M3 to bf16; on Ada ptxas rejects its code
STAGES = 3  # pipeline stages of loading keys and values
CONVERTING_STAGES = 2  # of codes of 8 and 4 bits: 128 µs with FP8 and 32 × 4,096 tokens, 153 with 3 (H200)
COPIES = 4.5  # shared memory in units of a tile of keys: compiled kernels take 4.3 to 4.4, on Turing 2.5


@triton.jit
def _cached(pointers, mask):
    """Load from the cache; bytes are E4M3 codes where Triton cannot convert them."""
    values = tl.load(pointers, mask=mask, other=0.0)
    if values.dtype == tl.uint8:
        values = e4m3(values)
    return values


@triton.jit
def rescale_factor(top, higher):
    """exp(top − higher), the factor of sums when the running maximum grows; 0 if both are −inf."""
    return tl.exp(top - tl.where(higher == -float("inf"), 0.0, higher))


@triton.jit
def initial_softmax(sinks, inside, reads_sinks, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Initial maximum and sum of weights: [ROWS]: the sinks' in the one program with `reads_sinks`, else empty."""
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        counts = inside & reads_sinks
        top = tl.load(sinks, mask=counts, other=-float("inf")).to(tl.float32)
        total = tl.where(counts, 1.0, 0.0)
    return top, total


@triton.jit
def _softmax_step(top, scores, seen, softcap, SOFTCAP: tl.constexpr):
    """New running maximum, the tile's weights, and the factor of earlier sums, for scores [ROWS, SLOTS]."""
    if SOFTCAP:
        ratio = 2 / (1 + tl.exp(-2 * scores / softcap)) - 1  # tanh
        scores = softcap * ratio
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    return higher, rescale_factor(scores, higher[:, None]), rescale_factor(top, higher)


@triton.jit
def attend_tile(top, total, acc, q, keys, values, mask, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """Accumulate one tile into the softmax of queries [ROWS, SIZE]: (maximum, sum of weights, weighted values).

    keys, values: pointers [SLOTS, SIZE], loaded where `mask`; seen: mask of scores [ROWS, SLOTS].
    """
    k = _cached(keys, mask).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    higher, weights, fade = _softmax_step(top, scores, seen, softcap, SOFTCAP)
    v = _cached(values, mask).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, axis=1), acc


@triton.jit
def _numbers4(codes, like):
    """Codes in the dtype of `like`, plus `_offset4`.

    In 16 bits a code is the low end of the mantissa of a power of two, which takes no conversion.
    """
    if like.dtype == tl.bfloat16:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif like.dtype == tl.float16:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def _offset4(like):
    return 128.0 if like.dtype == tl.bfloat16 else 1024.0 if like.dtype == tl.float16 else 0.0


@triton.jit
def _even_and_odd(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Split the columns of x [ROWS, SIZE], which `tl.interleave` joins again."""
    return tl.split(tl.reshape(x, (ROWS, SIZE // 2, 2)))


@triton.jit
def _tile4(
    tables, tile, tiles, head, key_ranges_ptr, value_ranges_ptr, size,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Page of one head, first slot and ranges of a tile: steps and least values of even and odd channels and of tokens.

    They are loaded one tile ahead; beyond the last of `tiles` tiles they are those of the last one.
    """
    start = tl.maximum(tl.minimum(tile, tiles - 1), 0) * SLOTS
    page = tl.load(tables + start // PAGE).to(tl.int64) * HEADS + head
    pair = tl.arange(0, SIZE // 2)
    keys = key_ranges_ptr + page * (2 * size) + 2 * pair
    values = value_ranges_ptr + page * (2 * PAGE) + start % PAGE + tl.arange(0, SLOTS)
    inside = pair < size // 2
    even, odd = tl.load(keys, mask=inside, other=0.0), tl.load(keys + 1, mask=inside, other=0.0)
    least_even = tl.load(keys + size, mask=inside, other=0.0)
    least_odd = tl.load(keys + size + 1, mask=inside, other=0.0)
    return page, start % PAGE, even, odd, least_even, least_odd, tl.load(values), tl.load(values + PAGE)


@triton.jit
def attend_tile4(
    top, total, even, odd, q_even, q_odd, keys_ptr, values_ptr, current, seen, size, scale, softcap,
    SIZE: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`attend_tile` for a tile of a cache in 4 bits; `current` is the result of `_tile4`.

    Queries and sums are split by even and odd channels, so that the two codes of a byte need not be joined. Ranges are
    applied to queries and weights, which are fewer than keys and values: with k = step · code + least,
    q·k = (q ∘ step)·code + q·least.
    """
    page, slot, step_even, step_odd, least_even, least_odd, step, least = current
    pair, s = tl.arange(0, SIZE // 2), slot + tl.arange(0, SLOTS)
    offset = _offset4(q_even)
    codes = (page * PAGE + s[:, None]) * (size // 2) + pair[None, :]
    mask = (s[:, None] < PAGE) & (pair[None, :] < size // 2)
    wide_even, wide_odd = q_even.to(tl.float32), q_odd.to(tl.float32)
    scaled_even = (wide_even * step_even.to(tl.float32)[None, :]).to(q_even.dtype)
    scaled_odd = (wide_odd * step_odd.to(tl.float32)[None, :]).to(q_even.dtype)
    shift = wide_even * least_even.to(tl.float32)[None, :] - offset * scaled_even.to(tl.float32)
    shift += wide_odd * least_odd.to(tl.float32)[None, :] - offset * scaled_odd.to(tl.float32)
    k = tl.load(keys_ptr + codes, mask=mask, other=0)
    scores = tl.dot(scaled_even, tl.trans(_numbers4(k & 15, q_even)), input_precision="ieee")
    scores = tl.dot(scaled_odd, tl.trans(_numbers4(k >> 4, q_even)), scores, input_precision="ieee")
    scores = (scores + tl.sum(shift, axis=1)[:, None]) * scale
    higher, weights, fade = _softmax_step(top, scores, seen, softcap, SOFTCAP)
    scaled = (weights * step.to(tl.float32)[None, :]).to(q_even.dtype)
    shift = tl.sum(weights * least.to(tl.float32)[None, :] - offset * scaled.to(tl.float32), axis=1)[:, None]
    v = tl.load(values_ptr + codes, mask=mask, other=0)
    even = tl.dot(scaled, _numbers4(v & 15, q_even), even * fade[:, None] + shift, input_precision="ieee")
    odd = tl.dot(scaled, _numbers4(v >> 4, q_even), odd * fade[:, None] + shift, input_precision="ieee")
    return higher, total * fade + tl.sum(weights, axis=1), even, odd


def slots_of(device: Device, size: int, element_size: int, rows: int = 16) -> tuple[int, int]:
    """Cache slots per iteration, for heads padded to `size` and tiles of `rows` queries, and pipeline stages.

    One stage if even the fewest slots do not fit with more."""
    room = device.shared_bytes - (rows - 16) * size * element_size
    fitting = (slots for slots in SLOTS if COPIES * slots * size * element_size <= room)
    slots = next(fitting, None)
    return (SLOTS[-1], 1) if slots is None else (slots, STAGES)


def readable(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Cache tensors as kernels read them: E4M3 as bytes where Triton does not convert it."""
    if keys.dtype is torch.float8_e4m3fn and not device_of(keys).at_least(CONVERTS):
        return keys.view(torch.uint8), values.view(torch.uint8)
    return keys, values


def conversion_obstacle(keys: Tensor, *_: object) -> str | None:
    """Return why Triton cannot write to this cache, or None."""
    converts = keys.dtype is not torch.float8_e4m3fn or device_of(keys).at_least(CONVERTS)
    return None if converts else "writes E4M3 on Hopper and newer GPUs"


@triton.jit
def _attend_static(
    q_ptr, keys_ptr, values_ptr, first_ptr, last_ptr, sinks_ptr, out_ptr, slots, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    s = tl.arange(0, SLOTS)
    at = (program * GROUP + g[:, None]) * size + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < size)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    last = tl.load(last_ptr).to(tl.int32)
    first = tl.load(first_ptr + program // HEADS)
    if WINDOW > 0:
        first = tl.maximum(first, last + 1 - WINDOW)
    top, total = initial_softmax(sinks_ptr + program % HEADS * GROUP + g, g < GROUP, True, ROWS, SINKS)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(first // SLOTS * SLOTS, last + 1, SLOTS, num_stages=STAGES):
        slot = start + s
        used = (slot >= first) & (slot <= last)
        offsets = (program * slots + slot[:, None]) * size + d[None, :]
        mask = used[:, None] & (d[None, :] < size)
        top, total, acc = attend_tile(
            top, total, acc, q, keys_ptr + offsets, values_ptr + offsets, mask, used[None, :], scale, softcap, SOFTCAP
        )
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_static(
    k_ptr, v_ptr, keys_ptr, values_ptr, slot_ptr, heads, slots, size, k_batch, k_head, v_batch, v_head,
    SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, SIZE)
    k = tl.load(k_ptr + program // heads * k_batch + program % heads * k_head + d, mask=d < size, other=0.0)
    v = tl.load(v_ptr + program // heads * v_batch + program % heads * v_head + d, mask=d < size, other=0.0)
    at = (program * slots + tl.load(slot_ptr)) * size + d
    tl.store(keys_ptr + at, k.to(keys_ptr.dtype.element_ty), mask=d < size)
    tl.store(values_ptr + at, v.to(values_ptr.dtype.element_ty), mask=d < size)


_static_launcher, _store_static_launcher = Launcher(_attend_static), Launcher(_store_static)


def store_static_obstacle(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> str | None:
    """Return why this kernel cannot store_static these keys and values, or None."""
    if (
        k.shape[2] != 1
        or k.stride(3) != 1
        or v.stride(3) != 1
        or not keys.is_contiguous()
        or not values.is_contiguous()
    ):
        return "stores one token's, in whole caches"
    return None if k.dtype is v.dtype is keys.dtype is values.dtype else "needs caches in the dtype of keys and values"


@store_both_.kernel("cuda", "xpu", unless=store_static_obstacle)
def store_static(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    batch, heads, room, size = keys.shape
    strides = *k.stride()[:2], *v.stride()[:2]
    _store_static_launcher(
        batch * heads, (k, v, keys, values, slots), (heads, room, size, *strides), (max(power_of_2(size), 16),), warps=1
    )


@decode_attention.kernel("cuda", "xpu")
def attend_static(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    batch, heads, _, size = q.shape
    keys, values = readable(keys, values)
    group, padded = heads // keys.shape[1], max(power_of_2(size), 16)
    q = q.contiguous()
    out = torch.empty_like(q)
    _static_launcher(
        batch * keys.shape[1],
        (q, keys, values, first, last, last if sinks is None else sinks, out),
        (keys.shape[2], size, scale, softcap or 1.0),
        (keys.shape[1], group, max(power_of_2(group), 16), padded, *slots_of(device_of(q), padded, q.element_size()),
         window or 0, softcap is not None, sinks is not None),
        warps=4,
    )  # fmt: skip
    return out


STEPS4, LARGEST4 = tl.constexpr(float(STEPS)), tl.constexpr(LARGEST)  # of codes and ranges of a cache in 4 bits
AMPERE = (8, 0)
MOST_SPLITS = 32
WAVES = 2  # least programs per multiprocessor, if sequences are long enough
WIDEST = 128  # most queries of a bundle's tile, limited by registers
USUAL = 8  # sequences per bundle assumed in choosing the number of programs
MOST_PARTS = 8  # most parts of a bundle's pages; every program of a sequence adds up all of them


@triton.jit
def _attend_paged(
    q_ptr, keys_ptr, values_ptr, key_ranges_ptr, value_ranges_ptr, open_keys_ptr, open_values_ptr, sequences_ptr,
    tables_ptr, lengths_ptr, sinks_ptr, out_ptr, top_ptr, total_ptr,
    common_ptr, prefix_ptr, prefix_top_ptr, prefix_total_ptr, q_stride, stride, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """PARTS: partial results of `_share` for each sequence's first `common` pages; 0: none.

    FOUR: a cache in 4 bits, whose open pages the last program of a sequence reads; otherwise the pointers from
    `key_ranges_ptr` to `sequences_ptr` are not read.
    """
    program = tl.program_id(0).to(tl.int64)
    pair, split = program // SPLITS, program % SPLITS
    row, head = pair // HEADS, pair % HEADS
    g = tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    s = tl.arange(0, SLOTS)
    at = (head * GROUP + g[:, None]) * size + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < size)
    q = tl.load(q_ptr + row * q_stride + at, mask=inside, other=0.0)
    length = tl.load(lengths_ptr + row)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    top, total = initial_softmax(sinks_ptr + head * GROUP + g, g < GROUP, split == 0, ROWS, SINKS)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    if PARTS > 0:
        common = tl.load(common_ptr + row)
        first = tl.maximum(first, common * PAGE)
        read = (g < GROUP) & (common > 0) & (split == 0)
        for p in tl.static_range(PARTS):
            partial = (pair * GROUP + g) * PARTS + p
            its = tl.load(prefix_top_ptr + partial, mask=read, other=-float("inf"))
            sums = tl.load(prefix_ptr + partial[:, None] * size + d[None, :], mask=read[:, None] & inside, other=0.0)
            higher = tl.maximum(top, its)
            fade, new = rescale_factor(top, higher), rescale_factor(its, higher)
            acc = acc * fade[:, None] + sums * new[:, None]
            total = total * fade + tl.load(prefix_total_ptr + partial, mask=read, other=0.0) * new
            top = higher
    tiles_from, tiles_to = first // SLOTS, tl.cdiv(length, SLOTS)
    if FOUR:
        tiles_to = length // PAGE * (PAGE // SLOTS)
    tiles_per_split = tl.cdiv(tiles_to - tiles_from, SPLITS)
    begin = tiles_from + split.to(tl.int32) * tiles_per_split
    end = tl.minimum(begin + tiles_per_split, tiles_to)
    if FOUR:
        q_even, q_odd = _even_and_odd(q, ROWS, SIZE)
        even, odd = _even_and_odd(acc, ROWS, SIZE)
        tables = tables_ptr + row * stride
        current = _tile4(
            tables, begin, tiles_to, head, key_ranges_ptr, value_ranges_ptr, size, HEADS, SIZE, SLOTS, PAGE
        )
        for tile in tl.range(begin, end, num_stages=STAGES):
            following = _tile4(
                tables, tile + 1, tiles_to, head, key_ranges_ptr, value_ranges_ptr, size, HEADS, SIZE, SLOTS, PAGE
            )
            used = tile * SLOTS + s >= first
            top, total, even, odd = attend_tile4(
                top, total, even, odd, q_even, q_odd, keys_ptr, values_ptr, current, used[None, :], size, scale,
                softcap, SIZE, SLOTS, PAGE, SOFTCAP,
            )  # fmt: skip
            current = following
        acc = tl.interleave(even, odd)
        # then the open page
        keys_ptr, values_ptr = open_keys_ptr, open_values_ptr
        begin = length // PAGE * (PAGE // SLOTS)
        end = tl.where(split == SPLITS - 1, tl.cdiv(length, SLOTS), begin)
    for tile in tl.range(begin, end, num_stages=STAGES):
        start = tile * SLOTS
        if FOUR:
            page = tl.load(sequences_ptr + row)
        else:
            page = tl.load(tables_ptr + row * stride + start // PAGE).to(tl.int64)
        slot = start + s
        used = (slot >= first) & (slot < length)
        offsets = ((page * HEADS + head) * PAGE + start % PAGE + s[:, None]) * size + d[None, :]
        mask = used[:, None] & (d[None, :] < size)
        top, total, acc = attend_tile(
            top, total, acc, q, keys_ptr + offsets, values_ptr + offsets, mask, used[None, :], scale, softcap, SOFTCAP
        )
    if SPLITS == 1:
        out = row * HEADS * GROUP * size + at
        tl.store(out_ptr + out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    else:  # for a program without a tile, top is -inf and the sums are 0
        partial = (pair * GROUP + g) * SPLITS + split
        tl.store(out_ptr + partial[:, None] * size + d[None, :], acc, mask=inside)
        tl.store(top_ptr + partial, top, mask=g < GROUP)
        tl.store(total_ptr + partial, total, mask=g < GROUP)


@triton.jit
def _share(
    q_ptr, keys_ptr, values_ptr, key_ranges_ptr, value_ranges_ptr, tables_ptr, lengths_ptr, bundles_ptr, sums_ptr,
    top_ptr, total_ptr, q_stride, stride, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FOUR: tl.constexpr,
):  # fmt: skip
    """Partial attention over a part of a bundle's shared pages, for one key head and all its queries."""
    program = tl.program_id(0).to(tl.int64)
    pair, p = program // PARTS, program % PARTS
    bundle, head = pair // HEADS, pair % HEADS
    begin = tl.load(bundles_ptr + bundle * 3).to(tl.int64)
    count, pages = tl.load(bundles_ptr + bundle * 3 + 1), tl.load(bundles_ptr + bundle * 3 + 2)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, SIZE)
    s = tl.arange(0, SLOTS)
    row, query = begin + m // GROUP, head * GROUP + m % GROUP
    valid = m // GROUP < count
    inside = valid[:, None] & (d[None, :] < size)
    q = tl.load(q_ptr + row[:, None] * q_stride + query[:, None] * size + d[None, :], mask=inside, other=0.0)
    first = tl.zeros((ROWS,), tl.int32)
    tiles_from, tiles_to = 0, pages * (PAGE // SLOTS)
    if WINDOW > 0:
        first = tl.maximum(tl.load(lengths_ptr + row, mask=valid, other=0) - WINDOW, 0)
        tiles_from = tl.min(tl.where(valid, first, pages * PAGE), axis=0) // SLOTS
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    tiles_per_part = tl.cdiv(tiles_to - tiles_from, PARTS)
    start_tile = tiles_from + p.to(tl.int32) * tiles_per_part
    end_tile = tl.minimum(start_tile + tiles_per_part, tiles_to)
    if FOUR:
        q_even, q_odd = _even_and_odd(q, ROWS, SIZE)
        even, odd = _even_and_odd(acc, ROWS, SIZE)
        tables = tables_ptr + begin * stride
        current = _tile4(
            tables, start_tile, tiles_to, head, key_ranges_ptr, value_ranges_ptr, size, HEADS, SIZE, SLOTS, PAGE
        )
        for tile in tl.range(start_tile, end_tile, num_stages=STAGES):
            following = _tile4(
                tables, tile + 1, tiles_to, head, key_ranges_ptr, value_ranges_ptr, size, HEADS, SIZE, SLOTS, PAGE
            )
            seen = (tile * SLOTS + s)[None, :] >= first[:, None]
            top, total, even, odd = attend_tile4(
                top, total, even, odd, q_even, q_odd, keys_ptr, values_ptr, current, seen, size, scale, softcap,
                SIZE, SLOTS, PAGE, SOFTCAP,
            )  # fmt: skip
            current = following
        acc = tl.interleave(even, odd)
    else:
        for tile in tl.range(start_tile, end_tile, num_stages=STAGES):
            start = tile * SLOTS
            page = tl.load(tables_ptr + begin * stride + start // PAGE).to(tl.int64)
            offsets = ((page * HEADS + head) * PAGE + start % PAGE + s[:, None]) * size + d[None, :]
            mask = (s[:, None] >= 0) & (d[None, :] < size)
            seen = (start + s)[None, :] >= first[:, None]
            top, total, acc = attend_tile(
                top, total, acc, q, keys_ptr + offsets, values_ptr + offsets, mask, seen, scale, softcap, SOFTCAP
            )
    partial = (row * HEADS * GROUP + query) * PARTS + p
    tl.store(sums_ptr + partial[:, None] * size + d[None, :], acc, mask=inside)
    tl.store(top_ptr + partial, top, mask=valid)
    tl.store(total_ptr + partial, total, mask=valid)


@triton.jit
def _join(sums_ptr, top_ptr, total_ptr, out_ptr, size, SIZE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr):
    """Combine the partial results of a query's programs."""
    query = tl.program_id(0).to(tl.int64)
    p, d = tl.arange(0, PADDED), tl.arange(0, SIZE)
    valid = p < SPLITS
    top = tl.load(top_ptr + query * SPLITS + p, mask=valid, other=-float("inf"))
    total = tl.load(total_ptr + query * SPLITS + p, mask=valid, other=0.0)
    weights = tl.exp(top - tl.max(top, axis=0))
    offsets = (query * SPLITS + p[:, None]) * size + d[None, :]
    sums = tl.load(sums_ptr + offsets, mask=valid[:, None] & (d[None, :] < size), other=0.0)
    out = tl.sum(sums * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
    tl.store(out_ptr + query * size + d, out.to(out_ptr.dtype.element_ty), mask=d < size)


@triton.jit
def _store_paged(
    k_ptr, v_ptr, pages_ptr, slots_ptr, keys_ptr, values_ptr, k_stride, k_head, v_stride, v_head, size,
    HEADS: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store one token's keys and values. LIMIT: largest FP8 value; 0 for other caches."""
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


@triton.jit
def _ranges4(x, AXIS: tl.constexpr):
    """Step and least value in fp16, and codes, of x over `AXIS`."""
    x = tl.minimum(tl.maximum(x, -LARGEST4), LARGEST4)
    least, largest = tl.min(x, axis=AXIS), tl.max(x, axis=AXIS)
    step, least = ((largest - least) / STEPS4).to(tl.float16), least.to(tl.float16)
    wide = tl.expand_dims(step.to(tl.float32), AXIS)
    scaled = (x - tl.expand_dims(least.to(tl.float32), AXIS)) / tl.where(wide > 0, wide, 1.0)
    codes = tl.minimum(tl.maximum(tl.floor(scaled + 0.5), 0.0), STEPS4)
    return step, least, codes.to(tl.uint8)


@triton.jit
def _store_codes4(to_ptr, codes, page, size, SIZE: tl.constexpr, PAGE: tl.constexpr):
    """Pack codes [PAGE, SIZE] and write them to a page."""
    low, high = tl.split(tl.reshape(codes, (PAGE, SIZE // 2, 2)))
    s, pair = tl.arange(0, PAGE)[:, None], tl.arange(0, SIZE // 2)[None, :]
    tl.store(to_ptr + (page * PAGE + s) * (size // 2) + pair, low | (high << 4), mask=pair < size // 2)


@triton.jit
def _append4(
    k_ptr, v_ptr, keys_ptr, values_ptr, key_ranges_ptr, value_ranges_ptr, open_keys_ptr, open_values_ptr,
    pages_ptr, slots_ptr, sequences_ptr, k_stride, k_head, v_stride, v_head, size,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store one token of one head, and quantize the page that it completes."""
    program = tl.program_id(0).to(tl.int64)
    token, head = program // HEADS, program % HEADS
    d, s = tl.arange(0, SIZE), tl.arange(0, PAGE)
    slot = tl.load(slots_ptr + token)
    k = tl.load(k_ptr + token * k_stride + head * k_head + d, mask=d < size, other=0.0)
    v = tl.load(v_ptr + token * v_stride + head * v_head + d, mask=d < size, other=0.0)
    open_page = (tl.load(sequences_ptr + token) * HEADS + head) * PAGE
    tl.store(open_keys_ptr + (open_page + slot) * size + d, k, mask=d < size)
    tl.store(open_values_ptr + (open_page + slot) * size + d, v, mask=d < size)
    if slot == PAGE - 1:
        page = tl.load(pages_ptr + token) * HEADS + head
        newest = s[:, None] == PAGE - 1
        offsets = (open_page + s[:, None]) * size + d[None, :]
        earlier = (s[:, None] < PAGE - 1) & (d[None, :] < size)
        keys = tl.where(newest, k[None, :], tl.load(open_keys_ptr + offsets, mask=earlier, other=0.0)).to(tl.float32)
        step, least, codes = _ranges4(keys, 0)
        tl.store(key_ranges_ptr + page * (2 * size) + d, step, mask=d < size)
        tl.store(key_ranges_ptr + page * (2 * size) + size + d, least, mask=d < size)
        _store_codes4(keys_ptr, codes, page, size, SIZE, PAGE)
        values = tl.where(newest, v[None, :], tl.load(open_values_ptr + offsets, mask=earlier, other=0.0))
        values = values.to(tl.float32)
        first = tl.sum(tl.where(d[None, :] == 0, values, 0.0), axis=1)
        values = tl.where(d[None, :] < size, values, first[:, None])  # padding does not widen the ranges
        step, least, codes = _ranges4(values, 1)
        tl.store(value_ranges_ptr + page * (2 * PAGE) + s, step)
        tl.store(value_ranges_ptr + page * (2 * PAGE) + PAGE + s, least)
        _store_codes4(values_ptr, codes, page, size, SIZE, PAGE)


_append4_launcher = Launcher(_append4)
_paged_launcher, _share_launcher = Launcher(_attend_paged), Launcher(_share)
_join_launcher, _store_paged_launcher = Launcher(_join), Launcher(_store_paged)


def page_splits(device: Device, programs: int, pages: int, waves: int = WAVES) -> int:
    """Parts of a sequence's at most `pages` pages, if unsplit sequences would be `programs` programs."""
    splits = -(-waves * device.multiprocessors // max(programs, 1))
    return max(1, min(splits, pages, MOST_SPLITS))


def _takes_bundles(q: Tensor, group: int) -> bool:
    """Return whether tensor cores and registers suffice for a bundle's tile; otherwise sequences read separately."""
    device = device_of(q)
    cores = q.element_size() == 2 and (device.backend == "cpu" or device.at_least(AMPERE))  # "cpu": the interpreter
    return cores and power_of_2(BUNDLE * group) <= WIDEST


def _partial(queries: int, splits: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized fp32 sums [queries, parts, D], maxima and sums of weights [queries, parts]."""
    sums = q.new_empty(queries, splits, q.shape[2], dtype=torch.float32)
    return sums, sums.new_empty(queries, splits), sums.new_empty(queries, splits)


def _attend(
    q: Tensor,
    caches: tuple[Tensor, ...],
    four: bool,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None,
    sinks: Tensor | None,
) -> Tensor:
    """Launch the kernels of `paged_attention`, or of `paged_attention4`.

    Args:
        caches: keys and values; with `four`, followed by their ranges, the open pages, and the rows' sequences.
    """
    rows, heads, size = q.shape
    key_heads, device = caches[0].shape[1], device_of(q)
    group, padded = heads // key_heads, max(power_of_2(size), 16)
    q = q if q.stride()[1:] == (size, 1) else q.contiguous()
    numbers = q.stride(0), tables.stride(0), size, scale, softcap or 1.0
    options = window or 0, softcap is not None
    caches = caches if four else (*caches, *(lengths,) * 5)
    prefix_splits, prefix = 0, (lengths, q, lengths, lengths)  # placeholders, not read without shared pages
    stages = STAGES if caches[0].dtype is q.dtype else CONVERTING_STAGES

    def tile_of(queries: int) -> tuple[int, int]:
        slots, most = slots_of(device, padded, q.element_size(), queries)
        return slots, min(most, stages)

    if shared is not None and _takes_bundles(q, group):
        prefix_splits = min(page_splits(device, rows // USUAL * key_heads, tables.shape[1], 1), MOST_PARTS)
        sums = _partial(rows * heads, prefix_splits, q)
        tile = max(power_of_2(BUNDLE * group), 16)
        _share_launcher(
            len(shared.bundles) * key_heads * prefix_splits,
            (q, *caches[:4], tables, lengths, shared.bundles, *sums),
            numbers,
            (key_heads, group, tile, padded, PAGE, *tile_of(tile), prefix_splits, *options, four),
            warps=4 if tile <= 64 else 8,
        )
        prefix = shared.pages, *sums
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    splits = page_splits(device, rows * key_heads, tables.shape[1])
    split = _partial(rows * heads, splits, q) if splits > 1 else (out, lengths, lengths)
    tile = max(power_of_2(group), 16)
    _paged_launcher(
        rows * key_heads * splits,
        (q, *caches, tables, lengths, lengths if sinks is None else sinks, *split, *prefix),
        numbers,
        (key_heads, group, tile, padded, PAGE, *tile_of(16), splits, prefix_splits, *options, sinks is not None, four),
        warps=4,
    )
    if splits > 1:
        _join_launcher(rows * heads, (*split, out), (size,), (padded, splits, power_of_2(splits)), warps=4)
    return out


@paged_attention.kernel("cuda", "xpu")
def attend_paged(
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
    return _attend(q, readable(keys, values), False, tables, lengths, scale, window, softcap, shared, sinks)


@paged_attention4.kernel("cuda", "xpu")
def attend_paged4(
    q: Tensor,
    cache: Cache4,
    tables: Tensor,
    lengths: Tensor,
    sequences: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return _attend(q, (*cache, sequences), True, tables, lengths, scale, window, softcap, shared, sinks)


@append4_.kernel("cuda", "xpu")
def append4(k: Tensor, v: Tensor, cache: Cache4, pages: Tensor, slots: Tensor, sequences: Tensor) -> None:
    tokens, heads, size = k.shape
    k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (k, v))
    _append4_launcher(
        tokens * heads,
        (k, v, *cache, pages.contiguous(), slots.contiguous(), sequences.contiguous()),
        (*k.stride()[:2], *v.stride()[:2], size),
        (heads, max(power_of_2(size), 16), PAGE),
        warps=4,
    )


@store_paged.kernel("cuda", "xpu", unless=conversion_obstacle)
def store_pages(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    tokens, heads, size = k.shape
    k, v = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (k, v))
    padded = power_of_2(heads), power_of_2(size)
    limit = FP8_MAX[keys.dtype] if keys.dtype.itemsize == 1 else 0.0
    _store_paged_launcher(
        tokens,
        (k, v, pages.contiguous(), slots.contiguous(), keys, values),
        (*k.stride()[:2], *v.stride()[:2], size),
        (heads, *padded, keys.shape[2], limit),
        warps=min(max(padded[0] * padded[1] // 256, 1), 8),
    )
