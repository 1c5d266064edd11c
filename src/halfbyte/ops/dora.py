"""Reference of DoRA's sums over rows (Liu et al. 2024, arXiv:2402.09353)."""

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
