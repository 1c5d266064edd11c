"""Triton: causal convolution over documents and its gradient; a token's neighbours come from the L1 and L2 caches.

Bound by memory: forward moves 2 values per token and channel, backward 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import causal_conv as reference
from ..tiling import ceil_div
from .launch import Launcher

TOKENS, CHANNELS = 16, 128  # tile of a program


@triton.jit
def _z(
    x_ptr, weight_ptr, bias_ptr, token, begin, c, inside, channel_mask, channels,
    SIZE: tl.constexpr, BIAS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """z [TOKENS, CHANNELS] of these tokens, where they are `inside`."""
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for back in tl.static_range(SIZE):
        in_sequence = inside & (token - back >= begin)
        at = (token - back)[:, None] * channels + c[None, :]
        x = tl.load(x_ptr + at, mask=in_sequence[:, None] & channel_mask[None, :], other=0.0).to(tl.float32)
        total += (
            x * tl.load(weight_ptr + c * SIZE + SIZE - 1 - back, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        )
    if BIAS:
        total += tl.load(bias_ptr + c, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _forward(
    x_ptr, weight_ptr, bias_ptr, begins_ptr, out_ptr, tokens, channels,
    SIZE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside, channel_mask = token < tokens, c < channels
    begin = tl.load(begins_ptr + token, mask=inside, other=0)
    y = _z(x_ptr, weight_ptr, bias_ptr, token, begin, c, inside, channel_mask, channels, SIZE, BIAS, TOKENS, CHANNELS)
    if SILU:
        y = y / (1 + tl.exp(-y))
    at = token[:, None] * channels + c[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside[:, None] & channel_mask[None, :])


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, begins_ptr, out_ptr, tokens, channels,
    SIZE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, CHANNELS)
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    channel_mask = c < channels
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for ahead in tl.static_range(SIZE):  # later tokens whose window contains this one
        reader = token + ahead
        begin = tl.load(begins_ptr + reader, mask=reader < tokens, other=0)
        inside = (reader < tokens) & (token >= begin)
        at = reader[:, None] * channels + c[None, :]
        grad = tl.load(grad_ptr + at, mask=inside[:, None] & channel_mask[None, :], other=0.0).to(tl.float32)
        if SILU:
            z = _z(
                x_ptr,
                weight_ptr,
                bias_ptr,
                reader,
                begin,
                c,
                inside,
                channel_mask,
                channels,
                SIZE,
                BIAS,
                TOKENS,
                CHANNELS,
            )
            gate = 1 / (1 + tl.exp(-z))
            grad *= gate * (1 + z * (1 - gate))
        total += (
            grad
            * tl.load(weight_ptr + c * SIZE + SIZE - 1 - ahead, mask=channel_mask, other=0.0).to(tl.float32)[None, :]
        )
    at = token[:, None] * channels + c[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(token < tokens)[:, None] & channel_mask[None, :])


_forward_launcher, _backward_launcher = Launcher(_forward), Launcher(_backward)


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> tuple[int, tuple, tuple]:
    """Programs, numbers and constants of a launch."""
    tokens, channels = x.shape
    constants = weight.shape[1], bias is not None, silu, TOKENS, CHANNELS
    return ceil_div(tokens, TOKENS) * ceil_div(channels, CHANNELS), (tokens, channels), constants


@reference.causal_conv.kernel("cuda", "xpu")
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    programs, numbers, constants = _sizes(x, weight, bias, silu)
    bias_operand = x if bias is None else bias
    _forward_launcher(programs, (x, weight, bias_operand, begins, out), numbers, constants, warps=4)
    return out


@reference.causal_conv_backward.kernel("cuda", "xpu")
def causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool
) -> Tensor:
    grad = grad.contiguous()
    x = x.contiguous()
    weight = weight.contiguous()
    out = torch.empty_like(x)
    programs, numbers, constants = _sizes(x, weight, bias, silu)
    bias_operand = x if bias is None else bias
    _backward_launcher(programs, (grad, x, weight, bias_operand, begins, out), numbers, constants, warps=4)
    return out
