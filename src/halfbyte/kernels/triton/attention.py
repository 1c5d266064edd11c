"""Triton: causal attention within documents, and a deterministic backward: every sum has one program and one order.

The forward covers what FlashAttention and cuDNN do not: capped scores and sinks. A program owns queries of one head and
iterates over their keys with flash attention's running maximum; a sink is added at the end, since its value is 0.

The backward of FlashAttention 2 and cuDNN computes all three gradients in one pass over the keys. Programs of different
keys add to the dq of one query with atomics in arbitrary order, so two runs differ. Here are two passes: programs of
`_dq` own queries and iterate over their keys; programs of `_dkdv` own keys of one key head and iterate over their
queries, head by head of the group. This needs seven matmuls instead of five, but no sum depends on timing.

Tokens of all documents are concatenated, with bounds in `begins`. Tiles do not follow documents: a tile of 64 queries
may hold several short documents, or the end of one and the start of the next.

Answers that share a prompt follow it, each as a document. A query then attends to two spans: its prompt, and its
document up to itself. The queries that attend to a prompt's key are one span, up to the end of the last answer.

The mathematics is FlashAttention 2's (Dao 2023, algorithms 1 and 2), as in `ops.attention`. Scores are in units of
log 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.attention import Scores, Spans, attention, attention_backward, sinks_gradient
from ..device import device_of
from ..tiling import ceil_div, power_of_2
from .cross_entropy import _logits
from .launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)


class Block(NamedTuple):
    """Tile of a program: rows it owns, rows per iteration of its loop, warps, and pipeline stages."""

    rows: int
    loop_rows: int
    warps: int
    stages: int = 2


class Tiles(NamedTuple):
    """Tiles of the forward, of dq, and of dk and dv."""

    forward: Block
    dq: Block
    dkdv: Block


MEASURED = Block(64, 64, 4)  # of the backward
NARROW, WIDEST = 128, 256  # widths of a head
# By head width: the shared memory in KiB that a block needs, and the tiles. The first row for wide heads is the best of
# four on an H200; rows for less shared memory were chosen by the registers and spills of compiled kernels.
TILES = {
    NARROW: (
        (160, Tiles(Block(128, 64, 8, 3), MEASURED, MEASURED)),
        (99, Tiles(Block(128, 32, 8), MEASURED, MEASURED)),
        (0, Tiles(Block(64, 32, 4, 1), Block(64, 32, 4, 1), Block(64, 32, 4, 1))),
    ),
    WIDEST: (
        (200, Tiles(Block(128, 32, 8, 3), Block(128, 32, 8), Block(64, 32, 8))),
        (99, Tiles(Block(64, 32, 8), Block(64, 32, 8, 1), Block(32, 32, 8, 1))),
        (0, Tiles(Block(64, 32, 8, 1), Block(32, 32, 8, 1), Block(32, 16, 4, 1))),
    ),
}
AMPERE = (8, 0)


def tiles_of(query: Tensor) -> Tiles:
    """Tiles for heads of [N, Hq, D] on their device."""
    rows = TILES[NARROW if query.shape[-1] <= NARROW else WIDEST]
    return next(tiles for kib, tiles in rows if kib * 1024 <= device_of(query).shared_bytes)


@triton.jit
def _rows(
    base, start, stride, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load ROWS rows from `start` on, [ROWS, PADDED], of a head with token stride `stride`; 0 beyond `limit` and WIDTH.

    Offsets within a tile are 32-bit and the same for every tile: 64-bit addresses would take registers.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    pointers = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if WIDTH != PADDED:
        return tl.load(pointers, mask=(column < WIDTH) & (row < limit - start), other=0.0)
    if MASKED:
        return tl.load(pointers, mask=row < limit - start, other=0.0)
    return tl.load(pointers)


@triton.jit
def _reach(begins, start, rows, total, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Key ranges of a tile of queries.

    Returns the first key of each query; the block boundaries low, common and whole; and the end. All queries attend to
    all keys of blocks between common and whole; other blocks need a mask.
    """
    last = tl.minimum(start + BLOCK_Q, total) - 1
    first = tl.load(begins + rows, mask=rows < total, other=0)
    low, common = tl.load(begins + start), tl.load(begins + last)  # first key of any query; first key of all queries
    if WINDOW:
        first = tl.maximum(first, rows - WINDOW + 1)
        low = tl.maximum(low, start - WINDOW + 1)
        common = tl.maximum(common, last - WINDOW + 1)
    low = low // BLOCK_K * BLOCK_K
    diagonal = start // BLOCK_K * BLOCK_K  # from here on keys may be later than queries
    common = tl.minimum(tl.cdiv(common, BLOCK_K) * BLOCK_K, diagonal)  # from here on keys are in every query's document
    return first, low, tl.maximum(common, low), diagonal, last + 1


@triton.jit
def _softmax_blocks(
    acc, top, sums, q, rows, first, k, v, k_stride, v_stride, low, high, total, inner, outer,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Accumulate blocks of keys into the queries' softmax: (weighted values, maximum, sum of weights)."""
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_K)
        k_tile = _rows(k, start, k_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        scores, _slope = _logits(tl.dot(q, tl.trans(k_tile), input_precision="ieee"), inner, outer, CAPPED)
        if MASKED:
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = higher
        if MASKED:  # a query may not have attended to any key yet
            shift = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        v_tile = _rows(v, start, v_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")
        sums = sums * fade + tl.sum(p, 1)
        top = higher
    return acc, top, sums


@triton.jit(do_not_specialize=["total"])
def _forward(
    out, lse, q, k, v, begins, sinks,
    q_stride, q_head, k_stride, k_head, v_stride, v_head,
    total, inner, outer,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out [total, HEADS, WIDTH] and lse fp32 [HEADS, total]; a program computes BLOCK_Q rows of one head."""
    program = tl.program_id(0)
    head = program % HEADS
    start = (tl.cdiv(total, BLOCK_Q) - 1 - program // HEADS) * BLOCK_Q  # in a long document, longest programs first
    rows = start + tl.arange(0, BLOCK_Q)
    inside = rows < total
    first, low, common, diagonal, high = _reach(begins, start, rows, total, WINDOW, BLOCK_Q, BLOCK_K)
    q_tile = _rows(q + head * q_head, start, q_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK_Q], tl.float32)
    bounds = low, common, diagonal, high
    for segment in tl.static_range(3):  # only the blocks of the middle part need no mask
        acc, top, sums = _softmax_blocks(
            acc, top, sums, q_tile, rows, first, k, v, k_stride, v_stride, bounds[segment], bounds[segment + 1], total,
            inner, outer, WIDTH, PADDED, CAPPED, BLOCK_K, STAGES, segment != 1,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        fade = tl.exp2(top - higher)
        sums = sums * fade + tl.exp2(sink - higher)
        acc = acc * fade[:, None]
        top = higher
    tl.store(lse + head.to(tl.int64) * total + rows, (tl.log2(sums) + top) / LOG2E, mask=inside)
    columns = tl.arange(0, PADDED)
    pointers = out + rows[:, None].to(tl.int64) * (HEADS * WIDTH) + head * WIDTH + columns[None, :]
    tl.store(
        pointers, (acc / sums[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < WIDTH)
    )


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta, rows, first, k, v, k_stride, v_stride, low, high, total, inner, outer,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        keys = start + tl.arange(0, BLOCK_K)
        k_tile = _rows(k, start, k_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        v_tile = _rows(v, start, v_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        scores, slope = _logits(tl.dot(q, tl.trans(k_tile), input_precision="ieee"), inner, outer, CAPPED)
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v_tile), input_precision="ieee") - delta[:, None])
        if CAPPED:
            ds *= slope
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit
def _prompt_blocks(
    dq, q, dout, lse, delta, opening, closing, k, v, k_stride, v_stride, total, inner, outer,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate into dq over the keys of prompts, for each query from `opening` to before `closing`."""
    high = tl.max(closing)
    low = tl.min(tl.where(opening < closing, opening, high)) // BLOCK_K * BLOCK_K
    common = tl.minimum(tl.cdiv(tl.max(opening), BLOCK_K) * BLOCK_K, tl.cdiv(high, BLOCK_K) * BLOCK_K)
    common = tl.maximum(common, low)
    closed = tl.maximum(tl.min(closing) // BLOCK_K * BLOCK_K, common)  # up to here keys are in every query's prompt
    bounds = low, common, closed, high
    for segment in tl.static_range(3):
        dq = _dq_blocks(
            dq, q, dout, lse, delta, closing - 1, opening, k, v, k_stride, v_stride,
            bounds[segment], bounds[segment + 1], total, inner, outer,
            WIDTH, PADDED, CAPPED, BLOCK_K, STAGES, segment != 1,
        )  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["total"])
def _dq(
    dq, delta, dout, q, k, v, out, lse, begins, prompts, prompt_ends,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head, dout_stride, dout_head,
    total, scale, inner, outer,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SHARED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq [total, HEADS, WIDTH] and delta fp32 [HEADS, total]; a program computes BLOCK_Q rows of one head."""
    program = tl.program_id(0)
    head = program % HEADS
    start = (tl.cdiv(total, BLOCK_Q) - 1 - program // HEADS) * BLOCK_Q  # in a long document, longest programs first
    rows = start + tl.arange(0, BLOCK_Q)
    inside = rows < total
    first, low, common, diagonal, high = _reach(begins, start, rows, total, WINDOW, BLOCK_Q, BLOCK_K)
    q_tile = _rows(q + head * q_head, start, q_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    dout_tile = _rows(dout + head * dout_head, start, dout_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    out_tile = _rows(out + head * out_head, start, out_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    delta_tile = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    numbers = head.to(tl.int64) * total + rows
    tl.store(delta + numbers, delta_tile, mask=inside)
    lse_tile = tl.load(lse + numbers, mask=inside, other=0.0) * LOG2E
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    result = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    if SHARED:
        opening = tl.load(prompts + rows, mask=inside, other=0)
        closing = tl.load(prompt_ends + rows, mask=inside, other=0)
        result = _prompt_blocks(
            result, q_tile, dout_tile, lse_tile, delta_tile, opening, closing, k, v, k_stride, v_stride, total,
            inner, outer, WIDTH, PADDED, CAPPED, BLOCK_K, STAGES,
        )  # fmt: skip
    bounds = low, common, diagonal, high
    for segment in tl.static_range(3):
        result = _dq_blocks(
            result, q_tile, dout_tile, lse_tile, delta_tile, rows, first, k, v, k_stride, v_stride,
            bounds[segment], bounds[segment + 1], total, inner, outer,
            WIDTH, PADDED, CAPPED, BLOCK_K, STAGES, segment != 1,
        )  # fmt: skip
    columns = tl.arange(0, PADDED)
    pointers = dq + rows[:, None].to(tl.int64) * (HEADS * WIDTH) + head * WIDTH + columns[None, :]
    tl.store(pointers, (result * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v, keys, last, q, dout, lse, delta, q_stride, dout_stride, low, high, total, inner, outer,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, BLOCK_Q: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in tl.range(low, high, BLOCK_Q, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_Q)
        q_tile = _rows(q, start, q_stride, total, BLOCK_Q, WIDTH, PADDED, MASKED)
        dout_tile = _rows(dout, start, dout_stride, total, BLOCK_Q, WIDTH, PADDED, MASKED)
        lse_tile = tl.load(lse + rows, mask=rows < total, other=0.0) * LOG2E
        delta_tile = tl.load(delta + rows, mask=rows < total, other=0.0)
        scores, slope = _logits(tl.dot(k, tl.trans(q_tile), input_precision="ieee"), inner, outer, CAPPED)
        p = tl.exp2(scores - lse_tile[None, :])
        if MASKED:
            p = tl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < last[:, None]), p, 0.0)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(dout_tile), input_precision="ieee") - delta_tile[None, :])
        if CAPPED:
            ds *= slope
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["total"])
def _dkdv(
    dk, dv, delta, dout, q, k, v, lse, ends,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    total, scale, inner, outer,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, SHARED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv [total, HEADS / GROUP, WIDTH]; a program computes BLOCK_K rows of a key head, over all its queries."""
    program = tl.program_id(0)
    head = program % (HEADS // GROUP)
    start = program // (HEADS // GROUP) * BLOCK_K
    keys = start + tl.arange(0, BLOCK_K)
    inside = keys < total
    final = tl.minimum(start + BLOCK_K, total) - 1
    last = tl.load(ends + keys, mask=inside, other=0)  # end of the queries that attend to each key
    common, high = tl.load(ends + start), tl.load(ends + final)  # end of queries of all keys; end of queries of any key
    if SHARED:  # a prompt's keys have later queries than keys of the answer that follows it
        common, high = tl.min(tl.where(inside, last, total)), tl.max(last)
    if WINDOW:
        last = tl.minimum(last, keys + WINDOW)
        common = tl.minimum(common, start + WINDOW)
        high = tl.minimum(high, final + WINDOW)
    k_tile = _rows(k + head * k_head, start, k_stride, total, BLOCK_K, WIDTH, PADDED, True)
    v_tile = _rows(v + head * v_head, start, v_stride, total, BLOCK_K, WIDTH, PADDED, True)
    diagonal = tl.minimum(start + BLOCK_K, high)  # up to here queries may be earlier than keys
    diagonal = start + tl.cdiv(diagonal - start, BLOCK_Q) * BLOCK_Q
    common = tl.maximum(
        diagonal, start + (common - start) // BLOCK_Q * BLOCK_Q
    )  # up to here queries attend to every key
    dk_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    bounds = start, diagonal, common, high
    for member in range(GROUP):
        query = head * GROUP + member
        q_head_, dout_head_ = q + query * q_head, dout + query * dout_head
        numbers = query.to(tl.int64) * total
        lse_head, delta_head = lse + numbers, delta + numbers
        for segment in tl.static_range(3):
            dk_tile, dv_tile = _dkdv_blocks(
                dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
                dout_stride, bounds[segment], bounds[segment + 1], total, inner, outer,
                WIDTH, PADDED, CAPPED, BLOCK_Q, STAGES, segment != 1,
            )  # fmt: skip
    columns = tl.arange(0, PADDED)
    offsets = keys[:, None].to(tl.int64) * (HEADS // GROUP * WIDTH) + head * WIDTH + columns[None, :]
    stored = inside[:, None] & (columns[None, :] < WIDTH)
    tl.store(dk + offsets, (dk_tile * scale).to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + offsets, dv_tile.to(dv.dtype.element_ty), mask=stored)


_forward_launcher = Launcher(_forward)
_dq_launcher = Launcher(_dq)
_dkdv_launcher = Launcher(_dkdv)


def _strides(*tensors: Tensor) -> list[int]:
    """Strides of tokens and heads."""
    return [number for x in tensors for number in x.stride()[:2]]


def _factors(scores: Scores) -> tuple[float, float]:
    """Factors for `_logits`, for scores in units of log 2."""
    if scores.softcap is None:
        return 0.0, scores.scale * LOG2E.value
    return scores.scale / scores.softcap, scores.softcap * LOG2E.value


def obstacle(query: Tensor) -> str | None:
    """Return why these kernels do not support heads of [N, Hq, D], or None."""
    device = device_of(query)
    if query.shape[-1] > WIDEST:
        return f"heads of at most {WIDEST}"
    if device.backend == "cuda" and not device.at_least(AMPERE):
        return "needs an Ampere GPU or newer: on Turing, thousands of bytes are spilled"
    if query.dtype == torch.float32 and device.backend != "cpu":
        return "products of 16 bits"
    return None


def _forward_obstacle(query: Tensor, *operands: Any, prompts: Spans | None = None) -> str | None:
    if prompts is not None or (len(operands) == 6 and operands[5] is not None):
        return "answers that share a prompt have FlashAttention's forward"
    return obstacle(query)


@attention.kernel("cuda", "xpu", unless=_forward_obstacle)
def forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Spans, scores: Scores, sinks: Tensor | None = None,
    prompts: Spans | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, heads, width = query.shape
    out, logsumexp = query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)
    padded = max(16, power_of_2(width))
    block = tiles_of(query).forward
    constants = heads, heads // key.shape[1], width, padded, scores.window or 0, scores.softcap is not None
    _forward_launcher(
        ceil_div(tokens, block.rows) * heads,
        (out, logsumexp, query, key, value, documents[0], logsumexp if sinks is None else sinks),
        (*_strides(query, key, value), tokens, *_factors(scores)),
        (*constants, sinks is not None, block.rows, block.loop_rows, block.stages), block.warps,
    )  # fmt: skip
    return out, logsumexp


@attention_backward.kernel("cuda", "xpu", unless=lambda dout, *_, **__: obstacle(dout))
def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, documents: Spans,
    scores: Scores, sinks: Tensor | None = None, prompts: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    tokens, heads, width = query.shape
    group, (begins, ends) = heads // key.shape[1], documents
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    delta = torch.empty_like(logsumexp)
    padded = max(16, power_of_2(width))
    constants = heads, group, width, padded, scores.window or 0, scores.softcap is not None, prompts is not None
    numbers, shared = (tokens, scores.scale, *_factors(scores)), prompts or documents
    block, keys_block = tiles_of(query)[1:]
    _dq_launcher(
        ceil_div(tokens, block.rows) * heads, (dq, delta, dout, query, key, value, out, logsumexp, begins, *shared),
        (*_strides(query, key, value, out, dout), *numbers), (*constants, block.rows, block.loop_rows, block.stages),
        block.warps,
    )  # fmt: skip
    block = keys_block
    _dkdv_launcher(
        ceil_div(tokens, block.rows) * (heads // group), (dk, dv, delta, dout, query, key, value, logsumexp, ends),
        (*_strides(query, key, value, dout), *numbers), (*constants, block.loop_rows, block.rows, block.stages),
        block.warps,
    )  # fmt: skip
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, logsumexp, delta)
