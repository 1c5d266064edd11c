"""GEMV and small-batch GEMM with a 4-bit weight: the specification of what generation runs for every token.

y = x·Wᵀ + b for x [M, K] and W [N, K] in `ops.blockwise4`'s storage. With few rows the product is bound by reading W,
so the kernels decode W in registers and never write it: K·N/2 bytes of codes and a scale per block are all that moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..dispatch import op
from .blockwise4 import dequantize_blockwise4
from .low_rank import add_term
from .rows import linear_rows


@op("cuda.gemv4_row", "cuda.gemm4", "cuda.gemv4", "triton.gemv4", "native.gemv4")
def linear_blockwise4(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
    term: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`F.linear` of rows with a packed weight, and an adapter's term u·Bᵀ; no gradient.

    Kernels may sum in another order, and keep the weights in fp32 where this one rounds them to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed: uint8, (N·K+1)//2 bytes.
        absmax, nested, blocksize, quant_type: as in `dequantize_blockwise4`; blocks may cross rows.
        rows: N.
        bias: [N] in x's dtype, or None.
        term: u [M, r], whose rows may be part of longer ones, and B [N, r], in x's dtype.

    Returns:
        [M, N] in x's dtype.
    """
    return add_term(linear_rows(x, dequantized(x, packed, absmax, nested, blocksize, quant_type, rows), bias), term)


@op("cuda.gemv4_row")
def linears_blockwise4(x: Tensor, weights: Sequence[tuple]) -> list[Tensor]:
    """`linear_blockwise4` of the same rows with several weights, each its arguments after x but for the term."""
    return [linear_blockwise4(x, *weight) for weight in weights]


def dequantized(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
) -> Tensor:
    """[N, K] in x's dtype: the weight of `linear_blockwise4`."""
    numel = rows * x.shape[1]
    values = dequantize_blockwise4(packed, absmax, nested, blocksize, quant_type, numel, x.dtype)
    return values.view(rows, x.shape[1])
