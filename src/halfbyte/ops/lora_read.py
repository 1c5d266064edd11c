"""Low-rank GEMMs and FP8 cast of a linear's input or output gradients, fused in one pass.

Backward of projections i with one input, with dyᵢ = ∂L/∂yᵢ [M, Nᵢ] and an adapter's uᵢ = x·Aᵢᵀ [M, rᵢ]:

    vᵢ = s·dyᵢ·Bᵢ [M, rᵢ]        dBᵢ = s·dyᵢᵀ·uᵢ [Nᵢ, rᵢ]        codes = [dy₁, dy₂, …] in FP8

Forward, for an x that is not yet in FP8, u = x·Aᵀ and the codes of x. Each of these is a pass over a tensor for almost
no arithmetic: at 8,192 tokens of 4,096 values 67 MB, 16 µs on an H200, and GEMMs of such shapes are slower than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..formats.linear import linear_rows
from .fp8_scaling import Slot


class Read(NamedTuple):
    low: Tensor  # [v₁, v₂, …] [M, Σ r], in the dtype of x
    gradients: list[Tensor]  # gradient of each factor, in its shape
    codes: Tensor | None  # [M, Σ N]


def summed(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · a·b, accumulated in fp32 and rounded once to `dtype` where the device's GEMM supports it."""
    half = a.dtype in (torch.float16, torch.bfloat16)
    if a.is_cuda and torch.version.hip is None and dtype is torch.float32 and half:  # ROCm's GEMM has no out_dtype
        found = torch.mm(a, b, out_dtype=torch.float32)
        return found if scale == 1.0 else found.mul_(scale)
    return a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=scale).to(dtype)


@op("cuda.lora_read")
def lora_read(
    x: Tensor,
    more: Sequence[Tensor],
    factors: Sequence[Tensor | None],
    scalings: Sequence[float],
    low: Tensor | None,
    dtype: torch.dtype,
    slot: Slot | None,
    columns: Tensor | None,
) -> Read:
    """Compute the module's formulas for tensors that are concatenated along columns.

    Args:
        x, more: tensors [M, Nᵢ] of one float dtype.
        factors: Bᵢ [Nᵢ, rᵢ] in that dtype; None for a tensor without an adapter.
        scalings: s of each factor that is not None.
        low: [u₁, u₂, …] [M, Σ r]; None: compute no gradients.
        dtype: of the gradients.
        slot: casts the tensors to FP8, with a settled scale; None: no cast.
        columns: fp32 [Σ N], multiplied into the columns before the cast, or None.
    """
    parts = [(part, factor) for part, factor in zip((x, *more), factors, strict=True) if factor is not None]
    ranks = [factor.shape[1] for _, factor in parts]
    v, gradients = x.new_empty(x.shape[0], sum(ranks)), []
    for (part, factor), scaling, out in zip(parts, scalings, v.split(ranks, dim=1), strict=True):
        out.addmm_(part, factor, beta=0, alpha=scaling)
    if low is not None:
        lows = low.split(ranks, dim=1)
        gradients = [summed(p.t(), u, s, dtype) for (p, _), u, s in zip(parts, lows, scalings, strict=True)]
    return Read(v, gradients, None if slot is None else slot.cast(x, *more, factors=columns).values)


@op("cuda.low_rank")
def low_rank_rows(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """u = x·Aᵀ, where each row of x may skip rows of A.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        a: [R, K] in x's dtype.
        mask: [M, R] of zeros and ones in x's dtype, or None.

    Returns:
        [M, R] in x's dtype.
    """
    u = linear_rows(x, a)
    return u if mask is None else u * mask
