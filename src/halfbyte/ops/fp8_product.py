"""Products of FP8 codes, and the low-rank term that is added to them.

    out = (a·bᵀ) · a_scale · b_scale + s·u·F

Where a device's product can add to what is there, the term comes first and costs a write; elsewhere it is added to the
finished product, which is read and written once more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..notices import notice


class Term(NamedTuple):
    """s·u·F."""

    u: Tensor  # [M, r]
    factor: Tensor  # [r, N]
    scale: float

    def write(self, out: Tensor) -> None:
        out.addmm_(self.u, self.factor, beta=0, alpha=self.scale)

    def add(self, out: Tensor) -> None:
        out.addmm_(self.u, self.factor, alpha=self.scale)


@op("cuda.fp8_product")
def fp8_product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool, term: Term | None = None
) -> None:
    """The module's formula, written into `out`.

    Args:
        a, b: FP8 [M, K] and [N, K], contiguous; b is E4M3, and a too where b has a scale a row.
        a_scale: fp32 [].
        b_scale: fp32 [] or [N].
        out: [M, N], contiguous; fp32, fp16 or bf16.
        fast: let Hopper's tensor cores keep partial sums in fewer bits, which costs less; for forward products only.
        term: in the dtype of `out`, or None.
    """
    name = f"fp8-product-{a.device.type}"
    notice(name, f"no FP8 products on {a.device.type}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out, term)


def emulated(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, term: Term | None) -> None:
    """The same by a product in 16 or 32 bits."""
    exact = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32  # fp16 would overflow: E5M2 reaches 57344
    product = a.to(exact) @ b.to(exact).t()
    out.copy_(product.float() * (a_scale * b_scale))
    if term is not None:
        term.add(out)
