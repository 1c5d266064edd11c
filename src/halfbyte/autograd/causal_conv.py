"""A causal convolution over documents as a differentiable function of its input, which is all that it saves."""

from __future__ import annotations

from torch import Tensor

from ..ops import causal_conv as ops
from .function import OnceFunction


class _CausalConv(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, begins, silu):
        ctx.save_for_backward(x, weight, bias, begins)
        ctx.silu = silu
        return ops.causal_conv(x, weight, bias, begins, silu)

    @staticmethod
    def backward(ctx, grad):
        return ops.causal_conv_backward(grad, *ctx.saved_tensors, ctx.silu), None, None, None, None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool) -> Tensor:
    """As `ops.causal_conv`, for weights that are not trained."""
    return _CausalConv.apply(x, weight.detach(), None if bias is None else bias.detach(), begins, silu)
