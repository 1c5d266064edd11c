"""The gated delta rule as one differentiable function that saves its inputs alone."""

from __future__ import annotations

from torch import Tensor

from ..ops import delta_rule as ops
from ..ops.delta_rule import Rows
from .function import OnceFunction


class _DeltaRule(OnceFunction):
    @staticmethod
    def forward(ctx, *rows):
        ctx.save_for_backward(*rows)
        return ops.delta_rule(Rows(*rows))[0]

    @staticmethod
    def backward(ctx, grad):
        return tuple(ops.delta_rule_backward(grad, Rows(*ctx.saved_tensors)))


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """out [D, L, Hv, Dv] in the value's dtype of what `ops.delta_rule.Rows` has; each row begins without a state."""
    return _DeltaRule.apply(query, key, value, decay, beta)
