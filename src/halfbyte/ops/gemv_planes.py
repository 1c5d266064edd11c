"""GEMV and small-batch GEMM with a weight in bit planes, k-bit or HQQ; see `ops.gemv4`."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import op
from .bitplane import dequantize_bitplane
from .hqq import dequantize_hqq
from .rows import linear_rows


@op("cuda.gemv_planes_row", "cuda.gemm_planes", "cuda.gemv_planes")
def linear_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with a k-bit weight; no gradient.

    Kernels may sum in another order, and round codebook and product with the scale to x's dtype instead of the weight.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, factor, codebook: as in `dequantize_bitplane`, without zeros.
        rows: N.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    weight = dequantize_bitplane(packed, scales, None, factor, codebook, rows, x.shape[1], x.dtype)
    return linear_rows(x, weight, bias)


@op("cuda.gemm_planes", "cuda.gemv_planes")
def linear_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with an HQQ weight; no gradient.

    Kernels may sum in another order, and round scale · zero and the weight to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, zeros, bits, group: as in `dequantize_hqq`.
        rows: N.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_hqq(packed, scales, zeros, bits, group, rows, x.shape[1], x.dtype), bias)
