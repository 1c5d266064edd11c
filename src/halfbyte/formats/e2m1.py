"""E2M1, the 4-bit float of NVFP4 and MXFP4: rounding, packing, and the scales stored beside it.

A code is a sign bit and one of eight magnitudes (OCP Microscaling specification 1.0, section 5.3.3); two codes share a
byte, the even element in the LOW nibble. Scales are bytes: E4M3 (NVFP4, with one fp32 factor for the tensor) or E8M0, a
power of two (MXFP4). A value is magnitude · (scale · factor), with each product rounded to fp32, as FP4 GEMM units and
all published readers compute it.

On CPUs only products of few rows have a kernel: dequantizing needs two table look-ups a byte and one product in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .codebooks import constant
from .linear import linear_rows

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GAPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 1.0)  # distance to the next magnitude; the last one is not used
E4M3_MAX, E4M3_NAN = 448.0, 0x7F


@constant
def _thresholds(device: torch.device) -> Tensor:
    """Rounding thresholds, fp32 [7]: a magnitude above the i-th rounds to code i + 1 or more.

    They are the midpoints, so that ties go to the lower code. Where the upper code is the even one, the threshold is
    the next smaller float.
    """
    exact = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=device)
    below = torch.nextafter(exact, torch.zeros_like(exact))
    return torch.where(torch.arange(7, device=device) % 2 == 1, below, exact)


@constant
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@constant
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte, fp32 [256, 2]."""
    byte, table = torch.arange(256, device=device), codebook_e2m1(device)
    return torch.stack([table[byte & 15], table[byte >> 4]], dim=1)


def codebook_e2m1(device: torch.device) -> Tensor:
    """Value of each code, fp32 [16]; codes 8 to 15 are the negatives."""
    return _table((*MAGNITUDES, *(-value for value in MAGNITUDES)), device)


def encode_e2m1(values: Tensor) -> Tensor:
    """Encode fp32 `values` as uint8 codes: nearest, ties to the even code, saturating at ±6."""
    codes = torch.bucketize(values.abs(), _thresholds(values.device), out_int32=True)
    return (codes + 8 * torch.signbit(values)).to(torch.uint8)


def encode_e2m1_stochastic(values: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Encode fp32 `values` as uint8 codes, rounded up or down at random so that the expectation is the value.

    The probability of the upper neighbour is the fp32 distance from the lower one over their gap, without rounding: the
    subtraction is exact and the gap a power of two. It is compared with a 53-bit uniform number. Magnitudes above 6
    saturate, so the caller's scale must avoid them.
    """
    magnitude = values.abs().clamp(max=6)
    lower = torch.bucketize(magnitude, _table(MAGNITUDES[1:], values.device), out_int32=True, right=True)
    above = magnitude - _table(MAGNITUDES, values.device)[lower]
    probability = above / _table(GAPS, values.device)[lower]
    draw = torch.rand(values.shape, dtype=torch.float64, device=values.device, generator=generator)
    return (lower + (draw < probability) + 8 * torch.signbit(values)).to(torch.uint8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., n] into bytes [..., n/2], n even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def encode_e4m3(values: Tensor, *, up: bool = False) -> Tensor:
    """Encode fp32 values ≥ 0 as uint8 E4M3: nearest even, or with `up` rounded up; at most 448."""
    values = values.clamp(max=E4M3_MAX)
    codes = values.to(torch.float8_e4m3fn)
    raw = codes.view(torch.uint8)
    return raw + (codes.float() < values) if up else raw


def decode_scales(scales: Tensor, factor: Tensor | None) -> Tensor:
    """Decode scale bytes to fp32: E4M3 times the tensor's fp32 `factor`, or E8M0 if `factor` is None.

    A factor [E] belongs to E stacked matrices with equally many scale rows.
    """
    if factor is None:
        return scales.view(torch.float8_e8m0fnu).float()
    decoded = scales.view(torch.float8_e4m3fn).float()
    return decoded * (factor.repeat_interleave(len(scales) // len(factor))[:, None] if factor.dim() else factor)


@op("triton.packed4")
def dequantize_e2m1(
    packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], width: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize packed codes.

    Args:
        packed: uint8 [rows, padded/2]; `padded` is a multiple of the tile's columns.
        scales: uint8 [⌈rows/tile rows⌉, padded/tile columns].
        factor: fp32 [] for E4M3 scales, or [E] for E stacked matrices of whole tiles; None for E8M0.
        tile: rows and columns that share a scale: (1, 16), (16, 16) or (1, 32).
        width: columns of the result, at most `padded`.

    Returns:
        `dtype` [rows, width], rounded once from fp32.
    """
    rows, columns = packed.shape[0], scales.shape[1]
    step = decode_scales(scales, factor)
    if tile[0] > 1:
        step = step.repeat_interleave(tile[0], dim=0)[:rows]
    values = torch.nn.functional.embedding(packed.int(), _pairs(packed.device))
    values = values.view(rows, columns, tile[1]).mul_(step.unsqueeze(2)).view(rows, columns * tile[1])
    return values[:, :width].to(dtype).contiguous()


@op("cuda.few_rows", "triton.few_rows", "native.few_rows")
def linear_e2m1(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], bias: Tensor | None
) -> Tensor:
    """`F.linear` of rows with a packed weight; no gradient.

    Kernels may sum in another order, and multiply sums by the factor where the reference rounds weights to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed, scales, factor, tile: as in `dequantize_e2m1`, of a matrix.
        bias: [N] in x's dtype, or None.

    Returns:
        [M, N] in x's dtype.
    """
    return linear_rows(x, dequantize_e2m1(packed, scales, factor, tile, x.shape[1], x.dtype), bias)
