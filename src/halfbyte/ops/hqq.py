"""HQQ: affine groups whose zero points are fitted by half-quadratic splitting, without calibration data.

Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". A value is scale · (code − zero);
zero is a real number. With the scale fixed at the group's range over its steps, the zero minimises ‖W − Wr‖_p^p,
p = 0.7, which forgives outliers: the error is split into a sparse part E, found by shrinkage, and a rest of which the
best zero is a mean.

Codes are stored in the bit planes of `ops.bitplane`, so 3 bits pack without waste. Scales are bf16 (fp32's range),
zeros fp16 (their range is that of the codes), and what follows is fitted to them as they are stored. The fit runs in
fp64: its roundings then do not depend on the machine, and the bytes with them.

Without the fit the zero is where the range puts it, −low/scale: plain affine integers in one pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .bitplane import BLOCK, pack_planes, unpack_planes

NORM, BETA, BETA_GROWTH, ROUNDS = 0.7, 10.0, 1.01, 20
CHUNK = 1 << 22  # weights fitted at a time: about 200 MB of fp64


def quantize_hqq(
    groups: Tensor, bits: int, fit: bool = True, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of groups of weights, a chunk of groups at a time.

    Args:
        groups: [n, group], group a multiple of 32; fp32, fp16 or bf16, finite.
        bits: of a code; 8, 4, 3 or 2.
        fit: the zeros; otherwise they follow from the ranges, in fp32.
        scale_dtype: bf16 or fp16; a scale that fp16 does not hold is infinite or 0.

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
    low, high = low.clamp(max=0), high.clamp(min=0)  # a range that holds zero keeps the zero point among the codes
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
    """fp16 [n]: of the zeros that at most 20 rounds visit, those with the least mean absolute error.

    A group leaves as soon as its error stops falling: the result of one does not depend on its neighbours.

    Args:
        groups: fp64 [n, group].
        step: fp64 [n].
        zeros: fp16 [n], to start from.
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


@op("triton.hqq", "native.hqq")
def dequantize_hqq(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Values scale · (code − zero) in fp32, rounded once.

    Args:
        packed, scales, zeros: as `quantize_hqq` returns them.
        bits: of a code.
        group: weights per scale, a multiple of 32.
        rows, width: shape of the result; a row has ⌈width/group⌉ groups.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [rows, width].
    """
    codes = unpack_planes(packed, bits).view(-1, group)
    values = (codes - zeros.float().unsqueeze(1)).mul_(scales.float().unsqueeze(1))
    return values.to(dtype).view(rows, -(-width // group) * group)[:, :width].contiguous()
