"""Products of a few rows with a k-bit weight in bit planes; see `ops.gemv4`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op
from .bitplane import dequantize_bitplane


@op(twins="gemv_planes")
def linear_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with a k-bit weight; no gradient.

    Twins may sum in another order, and round codebook and product with the scale to x's dtype instead of the weight.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, factor, codebook: as in `dequantize_bitplane`, without zeros.
        rows: N.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    weight = dequantize_bitplane(packed, scales, None, factor, codebook, rows, x.shape[1], x.dtype)
    return F.linear(x, weight, bias)


linear_bitplane.twin("cpu")(linear_bitplane.reference)  # what it calls has a twin
