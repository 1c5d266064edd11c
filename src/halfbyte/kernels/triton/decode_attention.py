"""Triton: attention in decoding; a program has one key head of one row, and all queries that share it.

It reads the slots in use, once, whatever room the cache has, with the running maximum of flash attention (Dao et al.
2022, arXiv:2205.14135, section 3.1). The queries of a head fill a tensor core's rows as far as they go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.decode_attention import decode_attention
from ..device import Device, device_of
from ..tiling import power_of_2
from .float8 import e4m3
from .launch import Launcher

SLOTS = (64, 32, 16)  # of the cache that a program reads at a time: the most that fit, by `slots_of`
CONVERTS = (9, 0)  # E4M3 to bf16, by Triton: on Ada its assembler refuses what it writes
STAGES = 3  # steps whose keys and values are on their way at once
COPIES = 4.5  # of so many slots' keys, in shared memory: compiled kernels take 4.3 to 4.4, on Turing 2.5


@triton.jit
def cached(pointers, mask):
    """What is in the cache; bytes are the bits of E4M3, where Triton cannot convert it."""
    values = tl.load(pointers, mask=mask, other=0.0)
    if values.dtype == tl.uint8:
        values = e4m3(values)
    return values


@triton.jit
def _attend(
    q_ptr, keys_ptr, values_ptr, first_ptr, last_ptr, out_ptr, slots, size, scale, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
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
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, SIZE), tl.float32)
    for start in tl.range(first // SLOTS * SLOTS, last + 1, SLOTS, num_stages=STAGES):
        slot = start + s
        used = (slot >= first) & (slot <= last)
        where = (program * slots + slot[:, None]) * size + d[None, :]
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
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


_launcher = Launcher(_attend)


def slots_of(device: Device, size: int, element_size: int) -> tuple[int, int]:
    """For heads of `size` padded values; and stages: one, where the fewest slots do not fit with more."""
    fitting = (slots for slots in SLOTS if COPIES * slots * size * element_size <= device.shared_bytes)
    slots = next(fitting, None)
    return (SLOTS[-1], 1) if slots is None else (slots, STAGES)


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
) -> Tensor:
    batch, heads, _, size = q.shape
    if keys.dtype is torch.float8_e4m3fn and not device_of(q).at_least(CONVERTS):
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    group, padded = heads // keys.shape[1], max(power_of_2(size), 16)
    q = q.contiguous()
    out = torch.empty_like(q)
    _launcher(
        batch * keys.shape[1],
        (q, keys, values, first, last, out),
        (keys.shape[2], size, scale, softcap or 1.0),
        (keys.shape[1], group, max(power_of_2(group), 16), padded, *slots_of(device_of(q), padded, q.element_size()),
         window or 0, softcap is not None),
        warps=4,
    )  # fmt: skip
    return out
