"""FP8 (Micikevicius et al. 2022, arXiv:2209.05433): the specification of E4M3 weights with fp32 scales.

    scale = amax / 448 over its values (1 for a group of zeros)
    code  = E4M3(clamp(v / scale, ±448)), nearest, halves to even        v ≈ code · scale

A scale belongs to the whole tensor, to a row, or to a tile of 128×128 as in the block-FP8 checkpoints on Hugging Face,
where it is called weight_scale_inv. Tiles at the edges are smaller; they do not cross the matrices of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..dispatch import op

Scaling = Literal["tensor", "row", "tile"]
TILE = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST_AMAX = 2.0**-100  # smaller ones would make scales that fp32 does not hold
TINY = torch.finfo(torch.float32).tiny  # a smaller scale would lose digits of its own


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
    """fp32 scales, each repeated so that they broadcast with a tensor of `shape`."""
    if scaling == "tensor":
        return scale
    if scaling == "row":
        return scale.view(*shape[:-1], 1)
    for dim in range(-min(len(shape), 2), 0):
        scale = scale.repeat_interleave(TILE, dim).narrow(dim, 0, shape[dim])
    return scale


def _amax(weight: Tensor, scaling: Scaling) -> Tensor:
    """fp32 largest magnitudes, in the shape of the scales; NaN where there is one."""
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
    """E4M3 codes in the shape of `weight` (fp32, fp16 or bf16), and fp32 scales in that of `scale_shape`."""
    amax = _amax(weight, scaling)
    # By a tensor: CUDA divides by a plain number as it multiplies by its inverse, and so to other bits than a CPU.
    scale = torch.where(amax == 0, 1.0, amax / amax.new_full((), FP8_MAX[E4M3])).clamp(min=TINY)
    spread = spread_scales(scale, tuple(weight.shape), scaling)
    return to_float8(weight.float() / spread, E4M3), scale


def to_float8(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` (fp32) in an FP8 type, nearest, halves to even; magnitudes past its largest become that. NaN stays."""
    return values.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


@op("triton.float8")
def dequantize_float8(codes: Tensor, scale: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """`dtype` values in the shape of `codes` (E4M3, none NaN), rounded once from fp32."""
    return codes.float().mul_(spread_scales(scale, tuple(codes.shape), scaling)).to(dtype)


def scale_of(amax: Tensor, target: Tensor) -> Tensor:
    """fp32 target / amax where that is a positive number, else 1; amax below 2^-100 counts as that."""
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
    """FP8 codes of tensors side by side by delayed scaling, and their amax taken along.

    Args:
        scale: fp32 [], what values are multiplied by; 0: that of their own amax, for `target`.
        parts: [M, Kᵢ] each; fp32, fp16 or bf16.
        factors: fp32 [K], K the sum of Kᵢ, multiplied into the columns first, or None.
        target: fp32 [], the magnitude that amax is mapped to.
        newest: fp32 [], becomes the larger of itself and the amax, in place; not finite where a value is not.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        settled: the scale is known to be no 0, so that nobody need look for an amax first.

    Returns:
        `dtype` [M, K] codes, and fp32 [] inverse of the scale they were cast with.
    """
    values = torch.cat([part.float() for part in parts], dim=1)
    values = values if factors is None else values * factors
    amax = torch.linalg.vector_norm(values, torch.inf)
    used = torch.where(scale > 0, scale, scale_of(amax, target))
    newest.copy_(torch.maximum(newest, amax))
    return to_float8(values * used, dtype), 1 / used


@op("cuda.float8", "triton.float8")
def transpose_float8(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """The transpose [K, N] of FP8 codes [N, K], contiguous or into `out`: what a product takes that sums over N."""
    transposed = codes.view(torch.uint8).t()
    if out is None:
        return transposed.contiguous().view(codes.dtype)
    out.view(torch.uint8).copy_(transposed)
    return out
