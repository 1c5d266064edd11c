"""Triton: the backward of causal attention within documents, in which every sum has one owner and one order.

FlashAttention 2's and cuDNN's backward make all three gradients in one pass over the keys, so programs of different
keys add to dq of one query by atomics, in the order in which they come: two runs differ. Here are two passes. Programs
of `_dq` own queries and go through their keys; programs of `_dkdv` own keys of one key head and go through their
queries, head by head of its group. That is seven products instead of five, and no sum whose order depends on time.

Rows are flat: a document is where `begins` says, and no tile belongs to one, so a tile of 64 queries may hold several
short documents or the end of one and the beginning of the next.

Answers that share a prompt stand behind it, each a document. What a query sees is then two spans, its prompt and its
document up to itself; what sees a prompt's key is still one, from there to the end of the last answer.

The mathematics is FlashAttention 2's (Dao 2023, algorithm 2): p = exp(scale·q·kᵀ − lse), δ = Σ dout·out,
ds = p·(dout·vᵀ − δ), dq = scale·ds·k, dk = scale·dsᵀ·q, dv = pᵀ·dout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.attention import Spans, attention_backward
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)


class Block(NamedTuple):
    """A program's tile: rows that it owns, rows that it goes through at a time, warps."""

    rows: int
    others: int
    warps: int


QUERIES, KEYS = Block(64, 64, 4), Block(64, 64, 4)


@triton.jit
def _rows(
    base, start, stride, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """ROWS rows from `start` on [ROWS, PADDED] of a head, tokens `stride` elements apart; 0 beyond `limit` and WIDTH.

    Offsets within a tile are of 32 bits and the same for every tile: addresses of 64 would take registers.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    places = base + tl.cast(start, tl.int64) * stride + (row * stride + column)
    if WIDTH != PADDED:
        return tl.load(places, mask=(column < WIDTH) & (row < limit - start), other=0.0)
    if MASKED:
        return tl.load(places, mask=row < limit - start, other=0.0)
    return tl.load(places)


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta, rows, first, k, v, k_stride, v_stride, low, high, total, score_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_tile = _rows(k, start, k_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        v_tile = _rows(v, start, v_stride, total, BLOCK_K, WIDTH, PADDED, MASKED)
        p = tl.exp2(tl.dot(q, tl.trans(k_tile)) * score_scale - lse[:, None])
        if MASKED:
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v_tile)) - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit
def _prompt_blocks(
    dq, q, dout, lse, delta, opening, closing, k, v, k_stride, v_stride, total, score_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What the keys of prompts add, each query's from `opening` to before `closing`."""
    high = tl.max(closing)
    low = tl.min(tl.where(opening < closing, opening, high)) // BLOCK_K * BLOCK_K
    common = tl.minimum(tl.cdiv(tl.max(opening), BLOCK_K) * BLOCK_K, tl.cdiv(high, BLOCK_K) * BLOCK_K)
    common = tl.maximum(common, low)
    whole = tl.maximum(tl.min(closing) // BLOCK_K * BLOCK_K, common)  # up to here every query's prompt
    dq = _dq_blocks(
        dq, q, dout, lse, delta, closing - 1, opening, k, v, k_stride, v_stride, low, common, total, score_scale,
        WIDTH, PADDED, 0, BLOCK_K, True,
    )  # fmt: skip
    dq = _dq_blocks(
        dq, q, dout, lse, delta, closing - 1, opening, k, v, k_stride, v_stride, common, whole, total, score_scale,
        WIDTH, PADDED, 0, BLOCK_K, False,
    )  # fmt: skip
    return _dq_blocks(
        dq, q, dout, lse, delta, closing - 1, opening, k, v, k_stride, v_stride, whole, high, total, score_scale,
        WIDTH, PADDED, 0, BLOCK_K, True,
    )  # fmt: skip


@triton.jit(do_not_specialize=["total"])
def _dq(
    dq, delta, dout, q, k, v, out, lse, begins, prompts, prompt_ends,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head, dout_stride, dout_head,
    total, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq [total, HEADS, WIDTH] and delta fp32 [HEADS, total]; a program makes BLOCK_Q rows of one head."""
    program = tl.program_id(0)
    head = program % HEADS
    start = (tl.cdiv(total, BLOCK_Q) - 1 - program // HEADS) * BLOCK_Q  # in one long document, the most work first
    rows = start + tl.arange(0, BLOCK_Q)
    inside = rows < total
    last = tl.minimum(start + BLOCK_Q, total) - 1
    first = tl.load(begins + rows, mask=inside, other=0)  # the first key that a query sees
    low, common = tl.load(begins + start), tl.load(begins + last)  # the first of all; from which on all see them
    if WINDOW:
        first = tl.maximum(first, rows - WINDOW + 1)
        low = tl.maximum(low, start - WINDOW + 1)
        common = tl.maximum(common, last - WINDOW + 1)
    q_tile = _rows(q + head * q_head, start, q_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    dout_tile = _rows(dout + head * dout_head, start, dout_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    out_tile = _rows(out + head * out_head, start, out_stride, total, BLOCK_Q, WIDTH, PADDED, True)
    delta_tile = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    numbers = head.to(tl.int64) * total + rows
    tl.store(delta + numbers, delta_tile, mask=inside)
    lse_tile = tl.load(lse + numbers, mask=inside, other=0.0) * LOG2E
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    low = low // BLOCK_K * BLOCK_K
    whole = start // BLOCK_K * BLOCK_K  # from here on keys may be later than queries
    common = tl.minimum(tl.cdiv(common, BLOCK_K) * BLOCK_K, whole)  # from here on every query's document
    common = tl.maximum(common, low)
    result = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    if SHARED:
        opening = tl.load(prompts + rows, mask=inside, other=0)
        closing = tl.load(prompt_ends + rows, mask=inside, other=0)
        result = _prompt_blocks(
            result, q_tile, dout_tile, lse_tile, delta_tile, opening, closing, k, v, k_stride, v_stride, total,
            scale * LOG2E, WIDTH, PADDED, BLOCK_K,
        )  # fmt: skip
    result = _dq_blocks(
        result, q_tile, dout_tile, lse_tile, delta_tile, rows, first, k, v, k_stride, v_stride, low, common, total,
        scale * LOG2E, WIDTH, PADDED, WINDOW, BLOCK_K, True,
    )  # fmt: skip
    result = _dq_blocks(
        result, q_tile, dout_tile, lse_tile, delta_tile, rows, first, k, v, k_stride, v_stride, common, whole, total,
        scale * LOG2E, WIDTH, PADDED, WINDOW, BLOCK_K, False,
    )  # fmt: skip
    result = _dq_blocks(
        result, q_tile, dout_tile, lse_tile, delta_tile, rows, first, k, v, k_stride, v_stride, whole, last + 1, total,
        scale * LOG2E, WIDTH, PADDED, WINDOW, BLOCK_K, True,
    )  # fmt: skip
    columns = tl.arange(0, PADDED)
    places = dq + rows[:, None].to(tl.int64) * (HEADS * WIDTH) + head * WIDTH + columns[None, :]
    tl.store(places, (result * scale).to(dq.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def _dkdv_blocks(
    dk, dv, k, v, keys, last, q, dout, lse, delta, q_stride, dout_stride, low, high, total, score_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q_tile = _rows(q, start, q_stride, total, BLOCK_Q, WIDTH, PADDED, MASKED)
        dout_tile = _rows(dout, start, dout_stride, total, BLOCK_Q, WIDTH, PADDED, MASKED)
        lse_tile = tl.load(lse + rows, mask=rows < total, other=0.0) * LOG2E
        delta_tile = tl.load(delta + rows, mask=rows < total, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q_tile)) * score_scale - lse_tile[None, :])
        if MASKED:
            p = tl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < last[:, None]), p, 0.0)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv)
        ds = p * (tl.dot(v, tl.trans(dout_tile)) - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit(do_not_specialize=["total"])
def _dkdv(
    dk, dv, delta, dout, q, k, v, lse, ends,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    total, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dk and dv [total, HEADS / GROUP, WIDTH]; a program makes BLOCK_K rows of one key head, for all its queries."""
    program = tl.program_id(0)
    head = program % (HEADS // GROUP)
    start = program // (HEADS // GROUP) * BLOCK_K
    keys = start + tl.arange(0, BLOCK_K)
    inside = keys < total
    final = tl.minimum(start + BLOCK_K, total) - 1
    last = tl.load(ends + keys, mask=inside, other=0)  # behind the last query that sees a key
    common, high = tl.load(ends + start), tl.load(ends + final)  # up to which all are seen; behind the last of all
    if SHARED:  # a prompt's keys are seen longer than those of the answer behind it
        common, high = tl.min(tl.where(inside, last, total)), tl.max(last)
    if WINDOW:
        last = tl.minimum(last, keys + WINDOW)
        common = tl.minimum(common, start + WINDOW)
        high = tl.minimum(high, final + WINDOW)
    k_tile = _rows(k + head * k_head, start, k_stride, total, BLOCK_K, WIDTH, PADDED, True)
    v_tile = _rows(v + head * v_head, start, v_stride, total, BLOCK_K, WIDTH, PADDED, True)
    whole = tl.minimum(start + BLOCK_K, high)  # up to here queries may be earlier than keys
    whole = start + tl.cdiv(whole - start, BLOCK_Q) * BLOCK_Q
    common = tl.maximum(whole, start + (common - start) // BLOCK_Q * BLOCK_Q)  # up to here every key's document
    dk_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    for member in range(GROUP):
        query = head * GROUP + member
        q_head_, dout_head_ = q + query * q_head, dout + query * dout_head
        numbers = query.to(tl.int64) * total
        lse_head, delta_head = lse + numbers, delta + numbers
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, start, whole, total, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, True,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, whole, common, total, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, False,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, common, high, total, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, True,
        )  # fmt: skip
    columns = tl.arange(0, PADDED)
    offsets = keys[:, None].to(tl.int64) * (HEADS // GROUP * WIDTH) + head * WIDTH + columns[None, :]
    stored = inside[:, None] & (columns[None, :] < WIDTH)
    tl.store(dk + offsets, (dk_tile * scale).to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + offsets, dv_tile.to(dv.dtype.element_ty), mask=stored)


_dq_launcher, _dkdv_launcher = Launcher(_dq, num_stages=2), Launcher(_dkdv, num_stages=2)


@attention_backward.kernel("cuda")
def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, documents: Spans,
    scale: float, window: int | None, prompts: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, heads, width = query.shape
    group, (begins, ends) = heads // key.shape[1], documents
    dq, dk, dv = (x.new_empty(x.shape) for x in (query, key, value))
    delta = torch.empty_like(logsumexp)

    def strides(*tensors: Tensor) -> list[int]:
        return [number for x in tensors for number in x.stride()[:2]]

    constants = heads, group, width, max(16, power_of_2(width)), window or 0, prompts is not None
    block, shared = QUERIES, prompts or documents
    _dq_launcher(
        ceil_div(tokens, block.rows) * heads, (dq, delta, dout, query, key, value, out, logsumexp, begins, *shared),
        (*strides(query, key, value, out, dout), tokens, scale), (*constants, block.rows, block.others), block.warps,
    )  # fmt: skip
    block = KEYS
    _dkdv_launcher(
        ceil_div(tokens, block.rows) * (heads // group), (dk, dv, delta, dout, query, key, value, logsumexp, ends),
        (*strides(query, key, value, dout), tokens, scale), (*constants, block.others, block.rows), block.warps,
    )  # fmt: skip
    return dq, dk, dv
