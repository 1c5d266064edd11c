"""All that is read of tensors beside their product with frozen weights, in one pass over them.

Backward of projections i of one input, with dyᵢ = ∂L/∂yᵢ [M, Nᵢ] and an adapter's uᵢ = x·Aᵢᵀ [M, rᵢ]:

    vᵢ = s·dyᵢ·Bᵢ [M, rᵢ]        dBᵢ = s·dyᵢᵀ·uᵢ [Nᵢ, rᵢ]        codes = [dy₁, dy₂, …] in FP8

and forward, of an x that nobody has cast, u = x·Aᵀ and its codes. Each alone is a pass over a tensor for almost no
arithmetic: at 8,192 tokens of 4,096 values 67 MB, 16 µs on an H200, and GEMMs of such shapes take longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from .fp8_scaling import Slot


class Read(NamedTuple):
    low: Tensor  # [v₁, v₂, …] [M, Σ r], in the dtype of x
    gradients: list[Tensor]  # of each factor, in its shape
    codes: Tensor | None  # [M, Σ N]


def summed(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · a·b, summed in fp32 and rounded to `dtype` only, where the device's GEMM can do that."""
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
    """The module's formulas.

    Args:
        x, more: tensors [M, Nᵢ] of one dtype, float.
        factors: Bᵢ [Nᵢ, rᵢ] in that dtype; None where a tensor has none.
        scalings: s of each factor that is there.
        low: [u₁, u₂, …] [M, Σ r]; None: no gradients are wanted.
        dtype: of the gradients.
        slot: what the tensors are cast with to FP8, its scale settled; None: they are not.
        columns: fp32 [Σ N], multiplied into their columns before that, or None.
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
