"""GEMV and small-batch GEMM with an 8-bit weight, FP8 or int8; see `ops.gemv4`."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import op
from .float8 import E4M3, Scaling, dequantize_float8
from .int8 import dequantize_rows_int8
from .rows import linear_rows


@op("triton.gemv8")
def linear_float8(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    """`F.linear` of rows with an E4M3 weight; no gradient.

    Kernels may sum in another order, and keep the weights unrounded where this one rounds them to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes: uint8 [N, K], the bits of E4M3.
        scale, scaling: as in `dequantize_float8`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_float8(codes.view(E4M3), scale, scaling, x.dtype), bias)


@op("triton.gemv8")
def linear_int8(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of rows, not quantized, with an int8 weight; no gradient.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes, absmax: int8 [N, K] and fp32 [N], as in `dequantize_rows_int8`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_rows_int8(codes, absmax, x.dtype), bias)
