"""ggml's plain types: floats, and blocks of 32 weights with one fp16 scale (and minimum). The bytes are those of
`gguf.quants`, as long as no importances are given.

Layouts (ggml-common.h): `d` fp16 scale, `m` fp16 minimum, 4-bit codes two to a byte, the first half of the block in the
low nibbles; the fifth bits of Q5_* as one little-endian 32-bit word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .fits import Grid, fit_affine, fit_symmetric, inverse

BLOCK = 32
WITH_IMPORTANCE = Grid(-0.9, 0.05, 36)


def as_bytes(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` [..., n] cast to `dtype`, as bytes: uint8 [..., n · itemsize]."""
    return value.to(dtype).contiguous().view(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    """4-bit codes [N, 32] → bytes [N, 16]: the first 16 in the low halves."""
    low, high = codes.to(torch.uint8).bitwise_and(15).chunk(2, -1)
    return low | (high << 4)


def fifth_bits(codes: Tensor) -> Tensor:
    """Bit 4 of codes [N, 32] → bytes [N, 4]."""
    bits = (codes.to(torch.uint8) >> 4).view(-1, 4, 8)
    powers = 1 << torch.arange(8, device=codes.device)
    return (bits * powers).sum(-1).to(torch.uint8)


def q8_0(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 34]. Rounds half away from zero; importances change nothing."""
    d = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * inverse(d)
    floor = scaled.abs().floor()
    codes = scaled.sign() * (floor + (2 * (scaled.abs() - floor)).floor())
    return torch.cat([as_bytes(d, torch.float16), as_bytes(codes, torch.int8)], -1)


def _symmetric(x: Tensor, importance: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
    if importance is None:
        d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -levels
        return d, (x * inverse(d) + (levels + 0.5)).trunc_().clamp_(0, 2 * levels - 1)
    d = fit_symmetric(x, importance, levels).half().float()
    return d, ((x * inverse(d)).round_() + levels).clamp_(0, 2 * levels - 1)


def _affine(x: Tensor, importance: Tensor | None, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    if importance is None:
        low = x.amin(-1, keepdim=True)
        d = (x.amax(-1, keepdim=True) - low) / levels
        return d, low, ((x - low) * inverse(d) + 0.5).trunc_().clamp_(0, levels)
    d, minus = (each.half().float() for each in fit_affine(x, importance, levels, WITH_IMPORTANCE))
    return d, -minus, ((x + minus) * inverse(d)).round_().clamp_(0, levels)


def q4_0(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 18]: d·(q - 8)."""
    d, codes = _symmetric(x, importance, 8)
    return torch.cat([as_bytes(d, torch.float16), nibbles(codes)], -1)


def q4_1(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 20]: d·q + m."""
    d, m, codes = _affine(x, importance, 15)
    return torch.cat([as_bytes(d, torch.float16), as_bytes(m, torch.float16), nibbles(codes)], -1)


def q5_0(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 22]: d·(q - 16)."""
    d, codes = _symmetric(x, importance, 16)
    return torch.cat([as_bytes(d, torch.float16), fifth_bits(codes), nibbles(codes)], -1)


def q5_1(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 24]: d·q + m."""
    d, m, codes = _affine(x, importance, 31)
    parts = [as_bytes(d, torch.float16), as_bytes(m, torch.float16), fifth_bits(codes), nibbles(codes)]
    return torch.cat(parts, -1)
