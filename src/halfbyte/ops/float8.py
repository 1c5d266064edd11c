"""FP8 casts and GEMMs (Micikevicius et al. 2022, arXiv:2209.05433). `formats.float8` specifies the weights.

FP8 GEMMs take NF4 and FP4 weights as E4M3 codes with one scale (`float8_of_blockwise4`). The scale follows from the
weight's largest magnitude, which is constant, so no pass searches for it. A weight costs half a byte read and one byte
written, against 2.5 bytes for 16-bit values that are cast afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import op
from ..formats.blockwise4 import dequantize_blockwise4
from ..formats.float8 import E4M3, to_float8
from ..utils.notices import notice

SMALLEST_AMAX = 2.0**-100  # a smaller amax would give a scale that overflows fp32


def scale_of(amax: Tensor, target: Tensor) -> Tensor:
    """fp32 target / amax if amax is positive and finite, else 1; an amax below 2^-100 counts as 2^-100."""
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, target / amax.clamp(min=SMALLEST_AMAX), 1.0)


@op("triton.float8")
def cast_float8(
    scale: Tensor,
    tensors: Sequence[Tensor],
    factors: Tensor | None,
    target: Tensor,
    newest: Tensor,
    dtype: torch.dtype,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cast tensors to FP8, concatenated along columns, with delayed scaling, and record their amax.

    Args:
        scale: fp32 [], the factor of the values; 0: compute it from the values' amax and `target`.
        tensors: [M, Kᵢ] each; fp32, fp16 or bf16.
        factors: fp32 [K], K the sum of Kᵢ, multiplied into the columns first, or None.
        target: fp32 [], the magnitude that amax is mapped to.
        newest: fp32 [], becomes the maximum of itself and the amax, in place; not finite if any value is not.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        settled: the scale is known not to be 0, so kernels skip the pass for the amax.

    Returns:
        `dtype` [M, K] codes, and fp32 [] inverse of the scale used.
    """
    values = torch.cat([tensor.float() for tensor in tensors], dim=1)
    values = values if factors is None else values * factors
    amax = torch.linalg.vector_norm(values, torch.inf)
    used = torch.where(scale > 0, scale, scale_of(amax, target))
    newest.copy_(torch.maximum(newest, amax))
    return to_float8(values * used, dtype), 1 / used


@op("cuda.float8", "triton.float8")
def transpose_float8(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """Transpose FP8 codes [N, K] to [K, N], contiguous or into `out`, for GEMMs that reduce over N."""
    transposed = codes.view(torch.uint8).t()
    if out is None:
        return transposed.contiguous().view(codes.dtype)
    out.view(torch.uint8).copy_(transposed)
    return out


@op("cuda.float8", "triton.blockwise4")
def float8_of_blockwise4(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    shape: tuple[int, int],
    factor: Tensor,
    transposed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Convert a packed 4-bit weight to E4M3 codes of value · factor, rounded once from fp32.

    Args:
        packed, absmax, nested, blocksize, quant_type: as in `dequantize_blockwise4`.
        shape: (N, K) of the weight; K is a multiple of 8, so that each row starts at a 32-bit word of codes.
        factor: fp32 [], the inverse of the scale.
        transposed: write [K, N], for GEMMs that reduce over N.
        out: the destination, with adjacent columns and any row stride. None: a new tensor.

    Returns:
        float8_e4m3fn [N, K], or [K, N].
    """
    rows, width = shape
    values = dequantize_blockwise4.reference(packed, absmax, nested, blocksize, quant_type, rows * width, torch.float32)
    codes = to_float8(values.view(shape) * factor, E4M3)
    codes = codes.view(torch.uint8).t().contiguous().view(E4M3) if transposed else codes
    if out is None:
        return codes
    out.view(torch.uint8).copy_(codes.view(torch.uint8))
    return out


@op("cuda.float8")
def fp8_product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    """Write (a·bᵀ) · a_scale · b_scale into `out`.

    Args:
        a, b: FP8 [M, K] and [N, K], contiguous. b is E4M3; a is E4M3 if b has one scale per row.
        a_scale: fp32 [].
        b_scale: fp32 [] or [N].
        out: [M, N], contiguous; fp32, fp16 or bf16.
        fast: let Hopper's tensor cores accumulate in fewer bits, which is faster; for forward GEMMs only.
    """
    name = f"fp8-product-{a.device.type}"
    notice(name, f"no FP8 products on {a.device.type}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out)


def emulated(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor) -> None:
    """Write the same result into `out`, by a matmul in 16 or 32 bits."""
    exact = torch.bfloat16 if out.dtype == torch.bfloat16 else torch.float32  # fp16 would overflow: E5M2 reaches 57344
    product = a.to(exact) @ b.to(exact).t()
    out.copy_(product.float() * (a_scale * b_scale))
