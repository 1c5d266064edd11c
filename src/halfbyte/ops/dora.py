"""References of DoRA's operations on whole matrices (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op


@op("triton.dora")
def column_dots(a: Tensor, b: Tensor) -> Tensor:
    """Sum a·b over rows.

    Args:
        a, b: [M, N] with adjacent columns, one dtype and any row strides; fp32, fp16 or bf16 (fp64 on a CPU).

    Returns:
        [N], accumulated in fp32 (fp64 for fp64).
    """
    exact = torch.promote_types(a.dtype, torch.float32)
    return (a.to(exact) * b.to(exact)).sum(0)


@op("triton.dora")
def scale_rows(matrix: Tensor, by: Tensor, out: Tensor) -> Tensor:
    """Multiply each row of a matrix by a number and round once.

    Args:
        matrix: [N, K] contiguous; fp32, fp16 or bf16 (fp64 on a CPU).
        by: [N], fp32 or the matrix's dtype.
        out: [N, K] contiguous in the matrix's dtype, which is written to; it may be the matrix.

    Returns:
        `out`.
    """
    return torch.mul(matrix, by.unsqueeze(1), out=out)
