"""Row norms of DoRA's merged weights, and the gradient of its magnitudes (see `lora` for the formulas).

The norms ‖W + s·B·A‖ change with the adapters only. `StepNorms` holds those of a linear for all forwards and
recomputations of an optimizer step; elsewhere each call computes its own. CUDA graphs read the memory of `values`, so
whoever replays a graph that was captured with it writes new norms there first (`modeling.step_norms`).

Source: DoRA (Liu et al. 2024, arXiv:2402.09353, §4.3 for the detached norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats.base import Weight, is_quantized
from ..ops.dora import column_dots
from .function import OnceFunction
from .gemms import rows_of


@dataclass(frozen=True)
class StepNorms:
    """Norms of one linear that are valid during an optimizer step.

    Args:
        values: ‖W + s·B·A‖ by rows [N].
        dtype: dtype that W·Aᵀ was computed in.
        versions: versions of A and B that they were computed from.
    """

    values: Tensor
    dtype: torch.dtype
    versions: tuple[int, int]

    def are_of(self, a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
        """Whether a call that computes in `dtype` would get these norms: A and B have not been written to since."""
        return self.dtype is dtype and self.versions == (a._version, b._version)


@torch.no_grad()
def row_norms(
    weights: Sequence[Weight],
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    squares: Sequence[Tensor],
    scaling: float,
    dtype: torch.dtype,
) -> Tensor:
    """‖W + s·B·A‖ by rows, [n, N] in fp32 or fp64, for n linears of one shape and rank.

    Args:
        weights: [N, K] each, quantized or plain.
        a, b: [r, K] and [N, r] each.
        squares: ‖W‖² by rows, [N] each.
        scaling: s of all of them.
        dtype: dtype of W·Aᵀ, which quantized weights compute from their packed values; the rest is exact.
    """
    exact = torch.promote_types(dtype, torch.float32)
    stacked_a, stacked_b = torch.stack([*a]).to(exact), torch.stack([*b]).to(exact)
    values: list[Any] = [weight if is_quantized(weight) else weight.detach().to(dtype) for weight in weights]
    products = [F.linear(factor.to(dtype), value).t() for factor, value in zip(a, values, strict=True)]
    crossed = (torch.stack(products).to(exact) * stacked_b).sum(-1)
    squared = (_product(stacked_b, _product(stacked_a, stacked_a.mT)) * stacked_b).sum(-1)
    return (torch.stack([*squares]) + 2 * scaling * crossed + scaling**2 * squared).clamp_min(0).sqrt()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a·b for [n, M, K] and [n, K, N]; in place, since autocast would compute it in 16 bits."""
    return a.new_empty(*a.shape[:-1], b.shape[-1]).baddbmm_(a, b, beta=0)


class Scale(NamedTuple):
    """DoRA's magnitude m [N] of a projection, and its bias b [N] or None."""

    magnitude: Tensor
    bias: Tensor | None


def magnitude_gradient(dots: Tensor, grad: Tensor, bias: Tensor | None, magnitude: Tensor) -> Tensor:
    """dm = Σ dy∘(y - b) / m over rows, in the magnitude's dtype; 0 where m is 0, since such a y does not show c.

    Args:
        dots: Σ dy∘y over rows [N], fp32 or fp64 (`ops.dora.column_dots`).
        grad: dy [M, N].
        bias: b [N], or None.
        magnitude: m [N].
    """
    if bias is not None:
        dots = dots - bias * grad.sum(0, dtype=dots.dtype)
    m = magnitude.to(dots.dtype)
    return torch.where(m == 0, 0.0, dots / m).to(magnitude.dtype)


class _Join(OnceFunction):
    @staticmethod
    def forward(ctx, output, stream, magnitude, bias):
        total = output + stream
        ctx.save_for_backward(total, stream, magnitude, bias)
        return total

    @staticmethod
    def backward(ctx, grad):
        total, stream, magnitude, bias = ctx.saved_tensors
        rows = rows_of(grad)
        dm = magnitude_gradient(column_dots(rows, rows_of(total - stream)), rows, bias, magnitude)
        return grad, grad, dm, None


def join(output: Tensor, stream: Tensor, scale: Scale) -> Tensor:
    """output + stream [..., N], with the gradient of the output's magnitude from the difference of the two streams.

    Nothing but the streams is saved, which norms save anyway. The difference has the rounding of the sum: in bf16 it
    changes the gradient by 0.4 to 0.7% of its norm in the median layer of SmolLM2-135M and by 2.0% at most, where bf16
    itself changes it by 4.6 and 11%.

    Args:
        output: of a projection with DoRA for the use "deferred" (`autograd.lora`).
    """
    wider = torch.promote_types(output.dtype, stream.dtype)
    return _Join.apply(output.to(wider), stream.to(wider), *scale)
