"""Reference GEMM of two operands in NVFP4: E2M1 codes with an E4M3 scale per 16 values of the contraction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op
from ..formats.e2m1 import codebook_e2m1, decode_scales
from ..formats.nvfp4 import BLOCK
from ..utils.notices import notice

DOWN = 2.0**-12  # exact factor of both operands, which prevents fp16 overflow of the GEMM's sums


@op("cuda.float4")
def nvfp4_product(
    a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, factor: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply a·bᵀ · factor.

    Args:
        a, b: uint8 codes of E2M1 [M, C] and [N, C], C a multiple of 16.
        a_scales, b_scales: uint8 bytes of E4M3 [M, C/16] and [N, C/16], or [⌈N/16⌉, C/16] for tiles of 16×16.
        factor: fp32 [], the product of the operands' factors.
        dtype: of the result; fp32, fp16 or bf16.

    Returns:
        `dtype` [M, N].
    """
    why = f"no FP4 GEMMs on {a.device.type}: NVFP4 codes are multiplied in {dtype}, on equal values"
    notice(f"nvfp4-product-{a.device.type}", why)
    return emulated(a, b, a_scales, b_scales, factor, dtype)


def emulated(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the result of `nvfp4_product` by a matmul in `dtype`.

    A code times its scale has six significant bits, so both operands are exact in bf16 and fp16.
    """
    return F.linear(values(a, a_scales, dtype), values(b, b_scales, dtype)).mul_(factor / DOWN**2)


def row_scales(scales: Tensor, rows: int) -> Tensor:
    """Repeat the scales of tiles of 16×16 for each of `rows` rows; scales of rows are returned as they are."""
    return scales if len(scales) == rows else scales.repeat_interleave(BLOCK, dim=0)[:rows]


def values(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes times E4M3 scales times 2^-12, `dtype` [rows, C]."""
    step = decode_scales(row_scales(scales, len(codes)), torch.full((), DOWN, device=scales.device))
    numbers = codebook_e2m1(codes.device)[codes.int()].view(*step.shape, BLOCK) * step.unsqueeze(2)
    return numbers.view(codes.shape).to(dtype)
