"""Triton: the backward of causal attention within documents, in which every sum has one owner and one order.

FlashAttention 2's and cuDNN's backward make all three gradients in one pass over the keys, so programs of different
keys add to dq of one query by atomics, in the order in which they come: two runs differ. Here are two passes. Programs
of `_dq` own queries and go through their keys; programs of `_dkdv` own keys of one key head and go through their
queries, head by head of its group. That is seven products instead of five, and no sum whose order depends on time.

Rows are flat: a document is where `begins` says, and no tile belongs to one, so a tile of 64 queries may hold several
short documents or the end of one and the beginning of the next.

The mathematics is FlashAttention 2's (Dao 2023, algorithm 2): p = exp(scale·q·kᵀ − lse), δ = Σ dout·out,
ds = p·(dout·vᵀ − δ), dq = scale·ds·k, dk = scale·dsᵀ·q, dv = pᵀ·dout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(base, rows, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """The rows [len(rows), PADDED] of a head, whose tokens are `stride` elements apart; 0 beyond `limit` and WIDTH."""
    columns = tl.arange(0, PADDED)
    places = base + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if WIDTH != PADDED:
        return tl.load(places, mask=(columns[None, :] < WIDTH) & (rows[:, None] < limit), other=0.0)
    if MASKED:
        return tl.load(places, mask=rows[:, None] < limit, other=0.0)
    return tl.load(places)


@triton.jit
def _dq_blocks(
    dq, q, dout, lse, delta, rows, first, k, v, k_stride, v_stride, low, high, total, score_scale,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k_tile = _rows(k, keys, k_stride, total, WIDTH, PADDED, MASKED)
        v_tile = _rows(v, keys, v_stride, total, WIDTH, PADDED, MASKED)
        p = tl.exp2(tl.dot(q, tl.trans(k_tile)) * score_scale - lse[:, None])
        if MASKED:
            seen = (keys[None, :] <= rows[:, None]) & (keys[None, :] >= first[:, None])
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v_tile)) - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit(do_not_specialize=["total", "length", "batch"])
def _dq(
    dq, delta, dout, q, k, v, out, lse, begins,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, out_stride, out_head, dout_stride, dout_head,
    total, length, batch, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq [total, HEADS, WIDTH] and delta fp32 [HEADS, total]; a program makes BLOCK_Q rows of one head."""
    program = tl.program_id(0)
    head = program % HEADS
    place = program // HEADS
    tiles = tl.cdiv(total, BLOCK_Q) // batch  # of a row; the longest work first: the last tiles of all rows
    tile = (place % batch) * tiles + tiles - 1 - place // batch
    start = tile * BLOCK_Q
    rows = start + tl.arange(0, BLOCK_Q)
    inside = rows < total
    last = tl.minimum(start + BLOCK_Q, total) - 1
    first = tl.load(begins + rows, mask=inside, other=0)  # the first key that a query sees
    low, common = tl.load(begins + start), tl.load(begins + last)
    if WINDOW:
        first = tl.maximum(first, rows - WINDOW + 1)
        low = tl.maximum(low, start - WINDOW + 1)
        common = tl.maximum(common, last - WINDOW + 1)
    q_tile = _rows(q + head * q_head, rows, q_stride, total, WIDTH, PADDED, True)
    dout_tile = _rows(dout + head * dout_head, rows, dout_stride, total, WIDTH, PADDED, True)
    out_tile = _rows(out + head * out_head, rows, out_stride, total, WIDTH, PADDED, True)
    delta_tile = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + head.to(tl.int64) * total + rows, delta_tile, mask=inside)
    lse_places = lse + (rows // length).to(tl.int64) * (HEADS * length) + head * length + rows % length
    lse_tile = tl.load(lse_places, mask=inside, other=0.0) * LOG2E
    k += (head // GROUP) * k_head
    v += (head // GROUP) * v_head
    low = low // BLOCK_K * BLOCK_K
    whole = start // BLOCK_K * BLOCK_K  # from here on keys may be later than queries
    common = tl.minimum(tl.cdiv(common, BLOCK_K) * BLOCK_K, whole)  # from here on every query's document
    common = tl.maximum(common, low)
    result = tl.zeros([BLOCK_Q, PADDED], tl.float32)
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
    dk, dv, k, v, keys, last, q, dout, lse, delta, q_stride, dout_stride, low, high, total, length, lse_row,
    score_scale, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    for start in range(low, high, BLOCK_Q):
        rows = start + tl.arange(0, BLOCK_Q)
        q_tile = _rows(q, rows, q_stride, total, WIDTH, PADDED, MASKED)
        dout_tile = _rows(dout, rows, dout_stride, total, WIDTH, PADDED, MASKED)
        lse_places = lse + (rows // length).to(tl.int64) * lse_row + rows % length
        lse_tile = tl.load(lse_places, mask=rows < total, other=0.0) * LOG2E
        delta_tile = tl.load(delta + rows, mask=rows < total, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q_tile)) * score_scale - lse_tile[None, :])
        if MASKED:
            p = tl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < last[:, None]), p, 0.0)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv)
        ds = p * (tl.dot(v, tl.trans(dout_tile)) - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit(do_not_specialize=["total", "length", "batch"])
def _dkdv(
    dk, dv, delta, dout, q, k, v, lse, ends,
    q_stride, q_head, k_stride, k_head, v_stride, v_head, dout_stride, dout_head,
    total, length, batch, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dk and dv [total, HEADS / GROUP, WIDTH]; a program makes BLOCK_K rows of one key head, for all its queries."""
    program = tl.program_id(0)
    head = program % (HEADS // GROUP)
    place = program // (HEADS // GROUP)
    tiles = tl.cdiv(total, BLOCK_K) // batch  # of a row; the longest work first: the first tiles of all rows
    start = ((place % batch) * tiles + place // batch) * BLOCK_K
    keys = start + tl.arange(0, BLOCK_K)
    inside = keys < total
    final = tl.minimum(start + BLOCK_K, total) - 1
    last = tl.load(ends + keys, mask=inside, other=0)  # behind the last query that sees a key
    common, high = tl.load(ends + start), tl.load(ends + final)
    if WINDOW:
        last = tl.minimum(last, keys + WINDOW)
        common = tl.minimum(common, start + WINDOW)
        high = tl.minimum(high, final + WINDOW)
    k_tile = _rows(k + head * k_head, keys, k_stride, total, WIDTH, PADDED, True)
    v_tile = _rows(v + head * v_head, keys, v_stride, total, WIDTH, PADDED, True)
    whole = tl.minimum(start + BLOCK_K, high)  # up to here queries may be earlier than keys
    whole = start + tl.cdiv(whole - start, BLOCK_Q) * BLOCK_Q
    common = tl.maximum(whole, start + (common - start) // BLOCK_Q * BLOCK_Q)  # up to here every key's document
    dk_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, PADDED], tl.float32)
    for member in range(GROUP):
        query = head * GROUP + member
        q_head_, dout_head_ = q + query * q_head, dout + query * dout_head
        lse_head, delta_head = lse + query * length, delta + query.to(tl.int64) * total
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, start, whole, total, length, HEADS * length, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, True,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, whole, common, total, length, HEADS * length, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, False,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_blocks(
            dk_tile, dv_tile, k_tile, v_tile, keys, last, q_head_, dout_head_, lse_head, delta_head, q_stride,
            dout_stride, common, high, total, length, HEADS * length, scale * LOG2E,
            WIDTH, PADDED, WINDOW, BLOCK_Q, True,
        )  # fmt: skip
    columns = tl.arange(0, PADDED)
    offsets = keys[:, None].to(tl.int64) * (HEADS // GROUP * WIDTH) + head * WIDTH + columns[None, :]
    stored = inside[:, None] & (columns[None, :] < WIDTH)
    tl.store(dk + offsets, (dk_tile * scale).to(dk.dtype.element_ty), mask=stored)
    tl.store(dv + offsets, dv_tile.to(dv.dtype.element_ty), mask=stored)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, begins: Tensor, ends: Tensor,
    scale: float, window: int | None, tiles: tuple,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    total, heads, width = q.shape
    group = heads // k.shape[1]
    length = lse.shape[2] if lse.dim() >= 3 else total
    padded = max(16, triton.next_power_of_2(width))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty(heads, total, dtype=torch.float32, device=q.device)
    (q_m, q_n, q_warps, q_stages), (k_m, k_n, k_warps, k_stages) = tiles

    def strides(*tensors):
        return [number for x in tensors for number in x.stride()[:2]]

    def rows(block):
        return total // length if length % block == 0 else 1

    constants = heads, group, width, padded, window or 0
    _dq[(triton.cdiv(total, q_m) * heads,)](
        dq, delta, dout, q, k, v, out, lse, begins, *strides(q, k, v, out, dout), total, length, rows(q_m), scale,
        *constants, q_m, q_n, num_warps=q_warps, num_stages=q_stages,
    )  # fmt: skip
    _dkdv[(triton.cdiv(total, k_n) * (heads // group),)](
        dk, dv, delta, dout, q, k, v, lse, ends, *strides(q, k, v, dout), total, length, rows(k_n), scale,
        *constants, k_m, k_n, num_warps=k_warps, num_stages=k_stages,
    )  # fmt: skip
    return dq, dk, dv
