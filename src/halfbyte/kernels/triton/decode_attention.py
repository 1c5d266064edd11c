"""Triton: attention in decoding over a static cache; a program has one key head of one row, and all queries that share
it. It reads the slots in use, once, whatever room the cache has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.decode_attention import decode_attention, store_both_
from ..device import device_of
from ..tiling import power_of_2
from .cached_attention import attend_tile, begun, readable, slots_of
from .launch import Launcher


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, first_ptr, last_ptr, sinks_ptr, out_ptr, slots, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    g, d, s = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    at = (program * GROUP + g[:, None]) * size + d[None, :]
    inside = (g[:, None] < GROUP) & (d[None, :] < size)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    last = tl.load(last_ptr).to(tl.int32)
    first = tl.load(first_ptr + program // HEADS)
    if WINDOW > 0:
        first = tl.maximum(first, last + 1 - WINDOW)
    top, total = begun(sinks_ptr + program % HEADS * GROUP + g, g < GROUP, True, ROWS, SINKS)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(first // SLOTS * SLOTS, last + 1, SLOTS, num_stages=STAGES):
        slot = start + s
        used = (slot >= first) & (slot <= last)
        where = (program * slots + slot[:, None]) * size + d[None, :]
        mask = used[:, None] & (d[None, :] < size)
        top, total, acc = attend_tile(
            top, total, acc, q, keys_ptr + where, values_ptr + where, mask, used[None, :], scale, softcap, SOFTCAP
        )
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_both(
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


_launcher, _store_launcher = Launcher(_attend), Launcher(_store_both)


def store_obstacle(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> str | None:
    """Why this step's keys and values are not stored here."""
    if (
        k.shape[2] != 1
        or k.stride(3) != 1
        or v.stride(3) != 1
        or not keys.is_contiguous()
        or not values.is_contiguous()
    ):
        return "stores one token's, in whole caches"
    return None if k.dtype is v.dtype is keys.dtype is values.dtype else "needs caches in the dtype of keys and values"


@store_both_.kernel("cuda", "xpu", unless=store_obstacle)
def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    batch, heads, room, size = keys.shape
    strides = *k.stride()[:2], *v.stride()[:2]
    _store_launcher(
        batch * heads, (k, v, keys, values, slots), (heads, room, size, *strides), (max(power_of_2(size), 16),), warps=1
    )


@decode_attention.kernel("cuda", "xpu")
def attend(
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
    _launcher(
        batch * keys.shape[1],
        (q, keys, values, first, last, last if sinks is None else sinks, out),
        (keys.shape[2], size, scale, softcap or 1.0),
        (keys.shape[1], group, max(power_of_2(group), 16), padded, *slots_of(device_of(q), padded, q.element_size()),
         window or 0, softcap is not None, sinks is not None),
        warps=4,
    )  # fmt: skip
    return out
