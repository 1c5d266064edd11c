"""Triton: what kernels of attention in decoding share, whatever their cache: reading tiles of it, and the softmax.

A program goes over tiles of keys and values with the running maximum of flash attention (Dao et al. 2022,
arXiv:2205.14135, section 3.1), the queries of a head filling a tensor core's rows as far as they go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import Device, device_of
from .float8 import e4m3

SLOTS = (64, 32, 16)  # of the cache that a program reads at a time: the most that fit, by `slots_of`
CONVERTS = (9, 0)  # E4M3 to bf16, by Triton: on Ada its assembler refuses what it writes
STAGES = 3  # steps whose keys and values are on their way at once
COPIES = 4.5  # of so many slots' keys, in shared memory: compiled kernels take 4.3 to 4.4, on Turing 2.5


@triton.jit
def _cached(pointers, mask):
    """What is in the cache; bytes are the bits of E4M3, where Triton cannot convert it."""
    values = tl.load(pointers, mask=mask, other=0.0)
    if values.dtype == tl.uint8:
        values = e4m3(values)
    return values


@triton.jit
def rescaled(top, higher):
    """What sums under the maximum `top` are multiplied by under `higher`, where neither may have seen a score yet."""
    return tl.exp(top - tl.where(higher == -float("inf"), 0.0, higher))


@triton.jit
def begun(sinks, inside, here, ROWS: tl.constexpr, SINKS: tl.constexpr):
    """Maximum and sum of weights before any key: the sinks' own, of pointers [ROWS], for the one program that counts
    them (`here`)."""
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        counts = inside & here
        top = tl.load(sinks, mask=counts, other=-float("inf")).to(tl.float32)
        total = tl.where(counts, 1.0, 0.0)
    return top, total


@triton.jit
def attend_tile(top, total, acc, q, keys, values, mask, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """The softmax of queries [ROWS, SIZE] with one tile more: (maximum, sum of weights, weighted values).

    keys, values: pointers [SLOTS, SIZE], loaded where `mask`; seen: bool, of scores [ROWS, SLOTS].
    """
    k = _cached(keys, mask).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP:
        ratio = 2 / (1 + tl.exp(-2 * scores / softcap)) - 1  # tanh
        scores = softcap * ratio
    scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    weights = rescaled(scores, higher[:, None])
    fade = rescaled(top, higher)
    v = _cached(values, mask).to(q.dtype)
    acc = tl.dot(weights.to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, axis=1), acc


def slots_of(device: Device, size: int, element_size: int, rows: int = 16) -> tuple[int, int]:
    """For heads of `size` padded values and tiles of so many queries; and stages: one, where the fewest slots do not
    fit with more."""
    room = device.shared_bytes - (rows - 16) * size * element_size
    fitting = (slots for slots in SLOTS if COPIES * slots * size * element_size <= room)
    slots = next(fitting, None)
    return (SLOTS[-1], 1) if slots is None else (slots, STAGES)


def readable(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as kernels take it: E4M3 as bytes where Triton does not convert it."""
    if keys.dtype is torch.float8_e4m3fn and not device_of(keys).at_least(CONVERTS):
        return keys.view(torch.uint8), values.view(torch.uint8)
    return keys, values


def conversion_obstacle(keys: Tensor, *_: object) -> str | None:
    """Why Triton does not write to a cache; None: it does."""
    converts = keys.dtype is not torch.float8_e4m3fn or device_of(keys).at_least(CONVERTS)
    return None if converts else "writes E4M3 on Hopper and newer GPUs"
