"""Products of FP8 codes: out = (a·bᵀ) · a_scale · b_scale."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.notices import notice


@op("cuda.fp8_product")
def fp8_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    """The module's formula, written into `out`.

    Args:
        a, b: FP8 [M, K] and [N, K], contiguous; b is E4M3, and a too where b has a scale a row.
        a_scale: fp32 [].
        b_scale: fp32 [] or [N].
        out: [M, N], contiguous; fp32, fp16 or bf16.
        fast: let Hopper's tensor cores keep partial sums in fewer bits, which costs less; for forward products only.
    """
    name = f"fp8-product-{a.device.type}"
    notice(name, f"no FP8 products on {a.device.type}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out)


def emulated(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """The same by a product in 16 or 32 bits."""
    exact = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32  # fp16 would overflow: E5M2 reaches 57344
    product = a.to(exact) @ b.to(exact).t()
    out.copy_(product.float() * (a_scale * b_scale))
