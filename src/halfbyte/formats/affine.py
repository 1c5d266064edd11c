"""Rounding to affine integers in groups, with the scale of least squared error: value = (code − zero) · scale.

A scale that covers a group's range rounds all its values coarsely for the sake of its largest. Each group therefore
tries the scales `SHRINKS` times the one of its range, rounded to the dtype that the file stores, and takes the one with
the smallest squared error; values beyond the range are clamped. On the linear layers of llama-40m, groups of 128 and 4
bits, that raises the ratio of signal to error from 19.06 to 19.83 dB (symmetric) and from 19.91 to 20.36 dB (with
zeros); steps of 0.025 instead of 0.05 add 0.03 dB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.errors import ModelError
from .base import check_weight_finite

SHRINKS = (15 / 14, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # the first one reaches a positive extreme of 4 bits


class AffineCodes(NamedTuple):
    """A rounded matrix [N, K] in G groups of neighbouring columns.

    Attributes:
        codes: int32 [N, K], 0 to 2ᵇ − 1.
        zeros: int32 [N, G], the codes of zero.
        scales: [N, G] in the dtype that is stored.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor


def quantize_affine(weight: Tensor, group_size: int, bits: int, symmetric: bool, dtype: torch.dtype) -> AffineCodes:
    """Round a matrix to integers of `bits` bits, nearest, halves to even.

    Args:
        weight: [N, K], any float.
        symmetric: whether all zeros are 2ᵇ⁻¹; otherwise a group's zero follows from its range, which includes 0.
        dtype: of the scales.

    Raises:
        ModelError: groups do not divide K, or a value is NaN or Inf.
    """
    outputs, inputs = weight.shape
    if inputs % group_size:
        raise ModelError(f"groups of {group_size} do not divide {inputs} inputs", "use smaller groups")
    groups = weight.float().view(outputs, -1, group_size)
    top = 2**bits - 1
    lowest, highest = groups.amin(2), groups.amax(2)
    if symmetric:
        span = 2 * torch.maximum(-lowest, highest)
        zeros = torch.full_like(span, 2 ** (bits - 1))
    else:
        span = highest.clamp(min=0) - lowest.clamp(max=0)
        zeros = (-lowest.clamp(max=0) * top / span.clamp(min=torch.finfo(torch.float32).tiny)).round()
    if not weight.is_meta:
        check_weight_finite(span, "its group would be lost")
    unit = span.clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # of errors, whose squares would underflow
    scales = torch.ones_like(span, dtype=dtype)
    codes = zeros[..., None].expand_as(groups)
    lowest_error = (groups / unit).square().sum(2)  # of codes that are all 0
    for shrink in SHRINKS:
        candidate = (span * (shrink / top)).to(dtype)
        candidate = torch.where(candidate > 0, candidate, 1)
        step = candidate.float()[..., None]
        rounded = ((groups / step).round() + zeros[..., None]).clamp(0, top)
        error = (((rounded - zeros[..., None]) * step - groups) / unit).square().sum(2)
        better = error < lowest_error
        lowest_error = torch.where(better, error, lowest_error)
        scales = torch.where(better, candidate, scales)
        codes = torch.where(better[..., None], rounded, codes)
    return AffineCodes(codes.reshape(outputs, inputs).int(), zeros.int(), scales)
