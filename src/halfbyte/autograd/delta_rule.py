"""The gated delta rule as one differentiable function that saves its inputs alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops import delta_rule as ops
from ..ops.delta_rule import Rows, parts_of
from .function import OnceFunction


class _DeltaRule(OnceFunction):
    @staticmethod
    def forward(ctx, *rows):
        ctx.save_for_backward(*rows)
        with _own_products(rows[2]):
            outs = [ops.delta_rule(part)[0] for part in parts_of(Rows(*rows))]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    @staticmethod
    def backward(ctx, grad):
        parts = parts_of(Rows(*ctx.saved_tensors))
        grads = grad.split([part.value.shape[2] for part in parts], 2)
        with _own_products(grad):
            found = [ops.delta_rule_backward(each, part) for each, part in zip(grads, parts, strict=True)]
        of_five = zip(*(each[:5] for each in found), strict=True)
        return *(each[0] if len(each) == 1 else torch.cat(each, 2) for each in of_five), None


@contextlib.contextmanager
def _own_products(like: Tensor) -> Iterator[None]:
    """Products of fp32 whatever autocast says; on a GPU in TF32 where results are rounded to 16 bits, more coarsely."""
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
    """out [D, L, Hv, Dv] in the value's dtype of what `ops.delta_rule.Rows` has; each row begins without a state."""
    return _DeltaRule.apply(query, key, value, decay, beta, first)
