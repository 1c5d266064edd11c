"""Causal depthwise convolution over the last K tokens of a document, with optional SiLU: the specification.

    z_t = Σ_s w_(K−1−s)·x_(t−s) + b over the s < K inside t's document,    y = z, or z·σ(z)

All tokens are in one dimension, documents concatenated. Arithmetic is fp32 (fp64 for fp64 input), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op


def _sums(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor) -> Tensor:
    """z [N, C] in fp32 (fp64)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    x = x.to(exact)
    weight = weight.to(exact)
    size = weight.shape[1]
    total = x * weight[:, -1]
    for back in range(1, min(size, len(x))):
        total[back:] += (x[:-back] * weight[:, size - 1 - back]) * _inside(begins, back)
    return total if bias is None else total + bias.to(exact)


def _inside(begins: Tensor, back: int) -> Tensor:
    """Return whether the token `back` positions earlier is in the same document, bool [N − back, 1]."""
    return (torch.arange(len(begins) - back, device=begins.device) >= begins[back:]).unsqueeze(1)


@op("triton.causal_conv")
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool) -> Tensor:
    """Convolve x: y [N, C] in x's dtype.

    Args:
        x: [N, C]; fp32, fp16 or bf16.
        weight: [C, K], any float dtype; bias: [C].
        begins: int32 [N], the first token of each token's document.
        silu: return z·σ(z) instead of z.
    """
    total = _sums(x, weight, bias, begins)
    return (torch.nn.functional.silu(total) if silu else total).to(x.dtype)


@op("triton.causal_conv")
def causal_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool
) -> Tensor:
    """Gradient of x [N, C] in its dtype, from the gradient of y [N, C] and the forward's arguments."""
    total = _sums(x, weight, bias, begins)
    grad = grad.to(total.dtype)
    weight = weight.to(total.dtype)
    size = weight.shape[1]
    if silu:
        gate = total.sigmoid()
        grad = grad * gate * (1 + total * (1 - gate))
    out = grad * weight[:, -1]
    for back in range(1, min(size, len(x))):
        out[:-back] += (grad[back:] * weight[:, size - 1 - back]) * _inside(begins, back)
    return out.to(x.dtype)
