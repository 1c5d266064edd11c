"""Triton: one more token of a Gated DeltaNet, with one launch for the convolution and one for the recurrence.

A program of the recurrence reads and writes some columns of one head's state once. Each program normalises q and k, a
few hundred bytes, itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.delta_net import conv_step_, delta_step_
from ...ops.delta_rule import EPSILON
from ..tiling import power_of_2
from .launch import Launcher

CHANNELS = 256  # channels per program of the convolution
COLUMNS = 16  # columns of a state per program
WIDEST = 256  # largest Dk


@triton.jit
def _conv(
    x_ptr, weight_ptr, bias_ptr, states_ptr, seats_ptr, out_ptr, channels,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < channels
    window = (tl.load(seats_ptr + row) * channels + c) * (SIZE - 1)
    total = tl.zeros((CHANNELS,), tl.float32)
    for j in tl.static_range(SIZE):
        if j < SIZE - 1:
            x = tl.load(states_ptr + window + j, mask=inside, other=0.0)
        else:
            x = tl.load(x_ptr + row * channels + c, mask=inside, other=0.0)
        total += x.to(tl.float32) * tl.load(weight_ptr + c * SIZE + j, mask=inside, other=0.0).to(tl.float32)
        if j > 0:
            tl.store(states_ptr + window + j - 1, x, mask=inside)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    y = total / (1 + tl.exp(-total))
    tl.store(out_ptr + row * channels + c, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _unit(pointers, mask, eps):
    """Load a vector and normalise it to length one."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + eps)


@triton.jit
def _delta(
    mixed_ptr, a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, states_ptr, seats_ptr, out_ptr,
    key_size, value_size, scale, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(value_size, COLUMNS)
    program = tl.program_id(0)
    row, head = (program // blocks // HEADS).to(tl.int64), program // blocks % HEADS
    d, v = tl.arange(0, KEYS), program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    row_start = row * (2 * KEY_HEADS * key_size + HEADS * value_size)
    at = row_start + head // (HEADS // KEY_HEADS) * key_size + d
    query = _unit(mixed_ptr + at, d < key_size, eps) * scale
    key = _unit(mixed_ptr + at + KEY_HEADS * key_size, d < key_size, eps)
    values = mixed_ptr + row_start + 2 * KEY_HEADS * key_size + head * value_size + v
    value = tl.load(values, mask=v < value_size, other=0.0).to(tl.float32)
    step = tl.load(a_ptr + row * HEADS + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))  # softplus with torch's threshold
    fade = tl.exp(-tl.exp(tl.load(a_log_ptr + head).to(tl.float32)) * step)
    beta = 1 / (1 + tl.exp(-tl.load(b_ptr + row * HEADS + head).to(tl.float32)))
    offsets = (tl.load(seats_ptr + row) * HEADS + head) * key_size * value_size + d[:, None] * value_size + v[None, :]
    inside = (d < key_size)[:, None] & (v < value_size)[None, :]
    state = tl.load(states_ptr + offsets, mask=inside, other=0.0) * fade
    change = (value - tl.sum(state * key[:, None], axis=0)) * beta
    state += key[:, None] * change[None, :]
    tl.store(states_ptr + offsets, state, mask=inside)
    out = out_ptr + (row * HEADS + head) * value_size + v
    tl.store(out, tl.sum(state * query[:, None], axis=0).to(out_ptr.dtype.element_ty), mask=v < value_size)


_conv_launcher, _delta_launcher = Launcher(_conv), Launcher(_delta)


def conv_obstacle(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, seats: Tensor, *_: object
) -> str | None:
    if not all(tensor.is_contiguous() for tensor in (x, weight, states)):
        return "takes what is contiguous"
    return None if states.dtype is x.dtype else "takes states in x's dtype"


@conv_step_.kernel("cuda", "xpu", unless=conv_obstacle)
def conv(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, seats: Tensor) -> Tensor:
    (rows, channels), out = x.shape, torch.empty_like(x)
    _conv_launcher(
        rows * -(-channels // CHANNELS), (x, weight, x if bias is None else bias, states, seats, out), (channels,),
        (CHANNELS, weight.shape[1], bias is not None), warps=4,
    )  # fmt: skip
    return out


def delta_obstacle(
    mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor, *_: object
) -> str | None:
    if not all(tensor.is_contiguous() for tensor in (mixed, a, b, states)):
        return "takes what is contiguous"
    if states.shape[2] > WIDEST:
        return f"takes keys of up to {WIDEST}"
    return None if states.dtype is torch.float32 else "takes states in fp32"


@delta_step_.kernel("cuda", "xpu", unless=delta_obstacle)
def delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    seats: Tensor,
    key_heads: int,
) -> Tensor:
    rows, (_, heads, key_size, value_size) = len(mixed), states.shape
    out = mixed.new_empty(rows, heads, value_size)
    _delta_launcher(
        rows * heads * -(-value_size // COLUMNS), (mixed, a, b, a_log, dt_bias, states, seats, out),
        (key_size, value_size, key_size**-0.5, EPSILON),
        (key_heads, heads, max(power_of_2(key_size), 16), COLUMNS), warps=4,
    )  # fmt: skip
    return out
