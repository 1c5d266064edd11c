"""HQQ: affine groups whose zero points are fitted by half-quadratic splitting, without calibration data.

Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". A value is scale · (code − zero)
with a real-valued zero. The scale is the group's range over its steps; the zero minimises ‖W − Wr‖_p^p with p = 0.7,
which is robust to outliers. The error is split into a sparse part E, found by shrinkage, and a rest; the best zero for
the rest is a mean.

Codes are stored in the bit planes of `ops.bitplane`, so 3 bits pack without waste. Scales are bf16 (fp32's range) and
zeros fp16 (within the range of the codes); the fit uses both as stored. It runs in fp64, so that the bytes do not
depend on the machine.

Without the fit the zero is −low/scale, as in plain affine quantization.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .bitplane import BLOCK, pack_planes, unpack_planes
from .linear import linear_rows

NORM, BETA, BETA_GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20
CHUNK = 1 << 22  # weights fitted at a time: about 200 MB of fp64


def quantize_hqq(
    groups: Tensor, bits: int, fit: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups of weights to packed codes, scales and zeros, a chunk of groups at a time.

    Args:
        groups: [n, group], group a multiple of 32; fp32, fp16 or bf16, finite.
        bits: per code; 8, 4, 3 or 2.
        fit: fit the zeros; otherwise they follow from the ranges, in fp32.
        scale_dtype: bf16 or fp16; scales outside fp16's range become infinite or 0.

    Returns:
        packed int32 [n · group/32 · bits], scales `scale_dtype` [n], zeros fp16 [n].
    """
    chunks = groups.split(max(CHUNK // groups.shape[1], 1))
    packed, scales, zeros = zip(*(_quantize_chunk(chunk, bits, fit, scale_dtype) for chunk in chunks), strict=True)
    return torch.cat(packed), torch.cat(scales), torch.cat(zeros)


def _quantize_chunk(groups: Tensor, bits: int, fit: bool, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    top = 2**bits - 1
    groups = groups.double() if fit else groups.float()
    low, high = groups.aminmax(dim=1)
    low, high = low.clamp(max=0), high.clamp(min=0)  # a range that contains zero has its zero point among the codes
    scales = ((high - low) / top).to(scale_dtype)
    step = scales.to(groups.dtype).clamp(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / step).masked_fill(scales == 0, 0).half()
    if fit:
        zeros = _fit_zeros(groups, step, zeros, top)
    codes = _codes(groups, step.unsqueeze(1), zeros.unsqueeze(1), top)
    return pack_planes(codes.int().view(-1, BLOCK), bits), scales, zeros


def _codes(groups: Tensor, step: Tensor, zeros: Tensor, top: int) -> Tensor:
    return (groups / step + zeros).round_().clamp_(0, top)


def _fit_zeros(groups: Tensor, step: Tensor, zeros: Tensor, top: int) -> Tensor:
    """Zeros, fp16 [n], with the least mean absolute error among those of at most 20 iterations.

    A group leaves the iteration when its error stops falling, so its result does not depend on other groups.

    Args:
        groups: fp64 [n, group].
        step: fp64 [n].
        zeros: fp16 [n], initial values.
    """
    best = zeros.clone()
    least = torch.full_like(step, torch.inf)
    active = torch.arange(step.shape[0], device=step.device)
    beta = BETA
    for _ in range(ROUNDS):
        codes = _codes(groups, step.unsqueeze(1), zeros.double().unsqueeze(1), top)
        error = groups - (codes - zeros.double().unsqueeze(1)).mul_(step.unsqueeze(1))
        mean = error.abs().mean(1)
        falling = mean < least
        active, groups, step, least = active[falling], groups[falling], step[falling], mean[falling]
        best[active] = zeros[falling]
        if not len(active):
            break
        codes, error = codes[falling], error[falling]
        magnitude = error.abs()
        sparse = error.sign().mul_((magnitude - magnitude.pow(NORM - 1) / beta).clamp_(min=0))
        zeros = (codes - (groups - sparse).div_(step.unsqueeze(1))).mean(1).half()
        beta *= BETA_GROWTH
    return best


@op("triton.bitplane", "native.bitplane")
def dequantize_hqq(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Dequantize: scale · (code − zero) in fp32, rounded once.

    Args:
        packed, scales, zeros: as `quantize_hqq` returns them.
        bits: per code.
        group: weights per scale, a multiple of 32.
        rows, width: shape of the result; a row has ⌈width/group⌉ groups.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [rows, width].
    """
    codes = unpack_planes(packed, bits).view(-1, group)
    values = (codes - zeros.float().unsqueeze(1)).mul_(scales.float().unsqueeze(1))
    return values.to(dtype).view(rows, -(-width // group) * group)[:, :width].contiguous()


@op("cuda.linear_planes")
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
