"""FP8 (Micikevicius et al. 2022, arXiv:2209.05433): E4M3 weights with fp32 scales, casts and GEMMs: the specification.

    scale = amax / 448 over its values (1 for a group of zeros)
    code  = E4M3(clamp(v / scale, ±448)), nearest, halves to even        v ≈ code · scale

A scale covers the whole tensor, a row, or a tile of 128×128 as in the block-FP8 checkpoints on Hugging Face, which call
it weight_scale_inv. Tiles at the edges are smaller; tiles do not cross the matrices of a stack.

FP8 GEMMs take NF4 and FP4 weights as E4M3 codes with one scale (`float8_of_blockwise4`). The scale follows from the
weight's largest magnitude, which is constant, so no pass searches for it. A weight costs half a byte read and one byte
written, against 2.5 bytes for 16-bit values that are cast afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.notices import notice
from .blockwise4 import dequantize_blockwise4
from .linear import linear_rows

Scaling = Literal["tensor", "row", "tile"]
TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST_AMAX = 2.0**-100  # a smaller amax would give a scale that overflows fp32
TINY = torch.finfo(torch.float32).tiny  # a smaller scale would lose precision


def scale_shape(shape: tuple[int, ...], scaling: Scaling) -> tuple[int, ...]:
    """Shape of the scales of a tensor: [], [rows] over all but the last dimension, or [..., ⌈N/128⌉, ⌈K/128⌉]."""
    if scaling == "tensor":
        return ()
    if scaling == "row":
        return (torch.Size(shape[:-1]).numel(),)
    return (*shape[:-2], *(-(-size // TILE) for size in shape[-2:]))


def _as_matrices(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() > 1 else tensor.view(1, 1, -1)


def spread_scales(scale: Tensor, shape: tuple[int, ...], scaling: Scaling) -> Tensor:
    """fp32 scales, repeated to broadcast with a tensor of `shape`."""
    if scaling == "tensor":
        return scale
    if scaling == "row":
        return scale.view(*shape[:-1], 1)
    for dim in range(-min(len(shape), 2), 0):
        scale = scale.repeat_interleave(TILE, dim).narrow(dim, 0, shape[dim])
    return scale


def _amax(weight: Tensor, scaling: Scaling) -> Tensor:
    """Largest magnitudes, fp32 in the shape of the scales; NaN where a value is NaN."""
    shape = scale_shape(tuple(weight.shape), scaling)
    if scaling == "tensor":
        return torch.linalg.vector_norm(weight, torch.inf, dtype=torch.float32)
    if scaling == "row":
        return torch.linalg.vector_norm(weight.reshape(-1, weight.shape[-1]), torch.inf, dim=1, dtype=torch.float32)
    matrices = _as_matrices(weight)
    stack, rows, columns = matrices.shape
    tiles = torch.nn.functional.pad(matrices, (0, -columns % TILE, 0, -rows % TILE))
    tiles = tiles.view(stack, -(-rows // TILE), TILE, -1, TILE)
    return torch.linalg.vector_norm(tiles, torch.inf, dim=(2, 4), dtype=torch.float32).view(shape)


def quantize_float8(weight: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Quantize `weight` (fp32, fp16 or bf16) to E4M3 codes of its shape and fp32 scales of `scale_shape`."""
    amax = _amax(weight, scaling)
    # Divide by a tensor: for a Python number CUDA multiplies by the reciprocal, so its bits differ from a CPU's.
    scale = torch.where(amax == 0, 1.0, amax / amax.new_full((), FP8_MAX[E4M3])).clamp(min=TINY)
    spread = spread_scales(scale, tuple(weight.shape), scaling)
    return to_float8(weight.float() / spread, E4M3), scale


def to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast fp32 `values` to an FP8 type: nearest, halves to even, saturating. NaN is preserved."""
    return values.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


@op("triton.float8")
def dequantize_float8(codes: Tensor, scale: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """Dequantize E4M3 `codes` (none NaN) to `dtype`, rounded once from fp32."""
    return codes.float().mul_(spread_scales(scale, tuple(codes.shape), scaling)).to(dtype)


def scale_of(amax: Tensor, target: Tensor) -> Tensor:
    """fp32 target / amax if amax is positive and finite, else 1; an amax below 2^-100 counts as 2^-100."""
    usable = amax.isfinite() & (amax > 0)
    return torch.where(usable, target / amax.clamp(min=SMALLEST_AMAX), 1.0)


@op("triton.float8")
def cast_float8(
    scale: Tensor,
    parts: Sequence[Tensor],
    factors: Tensor | None,
    target: Tensor,
    newest: Tensor,
    dtype: torch.dtype,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cast tensors to FP8, concatenated along columns, with delayed scaling, and record their amax.

    Args:
        scale: fp32 [], the factor of the values; 0: compute it from the values' amax and `target`.
        parts: [M, Kᵢ] each; fp32, fp16 or bf16.
        factors: fp32 [K], K the sum of Kᵢ, multiplied into the columns first, or None.
        target: fp32 [], the magnitude that amax is mapped to.
        newest: fp32 [], becomes the maximum of itself and the amax, in place; not finite if any value is not.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        settled: the scale is known not to be 0, so kernels skip the pass for the amax.

    Returns:
        `dtype` [M, K] codes, and fp32 [] inverse of the scale used.
    """
    values = torch.cat([part.float() for part in parts], dim=1)
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


@op("triton.gemv8")
def linear_float8(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    """`F.linear` of rows with an E4M3 weight; no gradient.

    Kernels may sum in another order, and do not round the weights, which the reference rounds to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        codes: uint8 [N, K], the bits of E4M3.
        scale, scaling: as in `dequantize_float8`.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_float8(codes.view(E4M3), scale, scaling, x.dtype), bias)
