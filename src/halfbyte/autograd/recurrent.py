"""Differentiable operations of linear-attention layers: the gated delta rule and causal convolutions.

Both save only their inputs and recompute the rest in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops import causal_conv as conv_ops
from ..ops import delta_rule as ops
from ..ops.delta_rule import Rows, parts_of
from .function import OnceFunction


class _DeltaRule(OnceFunction):
    @staticmethod
    def forward(ctx, *rows):
        ctx.save_for_backward(*rows)
        with _fp32_matmuls(rows[2]):
            outs = [ops.delta_rule(part)[0] for part in parts_of(Rows(*rows))]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    @staticmethod
    def backward(ctx, grad):
        parts = parts_of(Rows(*ctx.saved_tensors))
        grads = grad.split([part.value.shape[2] for part in parts], 2)
        with _fp32_matmuls(grad):
            found = [ops.delta_rule_backward(each, part) for each, part in zip(grads, parts, strict=True)]
        by_input = zip(*(each[:5] for each in found), strict=True)
        return *(each[0] if len(each) == 1 else torch.cat(each, 2) for each in by_input), None


@contextlib.contextmanager
def _fp32_matmuls(like: Tensor) -> Iterator[None]:
    """Disable autocast; on a GPU allow TF32 if `like` is 16-bit, since the results are rounded to 16 bits anyway."""
    options = torch.backends.cuda.matmul
    before = options.allow_tf32
    with torch.autocast(like.device.type, enabled=False):
        try:
            options.allow_tf32 = before or (like.is_cuda and like.element_size() == 2)
            yield
        finally:
            options.allow_tf32 = before


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, first: Tensor | None = None
) -> Tensor:
    """The gated delta rule with an initial state of zero in each row; arguments as in `ops.delta_rule.Rows`.

    Returns:
        [D, L, Hv, Dv] in the value's dtype.
    """
    return _DeltaRule.apply(query, key, value, decay, beta, first)


class _CausalConv(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, begins, silu):
        ctx.save_for_backward(x, weight, bias, begins)
        ctx.silu = silu
        return conv_ops.causal_conv(x, weight, bias, begins, silu)

    @staticmethod
    def backward(ctx, grad):
        return conv_ops.causal_conv_backward(grad, *ctx.saved_tensors, ctx.silu), None, None, None, None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool) -> Tensor:
    """`ops.causal_conv` with a gradient of its input only; weight and bias are frozen."""
    return _CausalConv.apply(x, weight.detach(), None if bias is None else bias.detach(), begins, silu)
