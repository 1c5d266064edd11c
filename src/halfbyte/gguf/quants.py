"""Encoders for GGUF tensor types: floats, ggml's blocks of 32 weights, and its K-quants.

Blocks of 32 weights have one fp16 scale `d`, and Q4_1 and Q5_1 an fp16 minimum `m`. 4-bit codes are packed two to a
byte, the first half of the block in the low nibbles; the fifth bits of Q5_* form one little-endian 32-bit word. Without
importances the bytes equal the gguf library's.

K-quants have super-blocks of 256 weights, whose sub-blocks of 16 or 32 have scales (and minima) in 4 to 8 bits:

| type | sub-block | value             | sub-block scales | bits a weight |
|------|-----------|-------------------|------------------|---------------|
| Q2_K | 16        | d·s·q - dmin·m    | 4 bits each      | 2.625         |
| Q3_K | 16        | d·s·(q - 4)       | 6 bits, signed   | 3.4375        |
| Q4_K | 32        | d·s·q - dmin·m    | 6 bits each      | 4.5           |
| Q5_K | 32        | d·s·q - dmin·m    | 6 bits each      | 5.5           |
| Q6_K | 16        | d·s·(q - 32)      | 8 bits, signed   | 6.5625        |

d and dmin are fp16. Layouts: ggml-common.h (block_q4_0 … block_q6_K). The scale searches are in `fits`. After them the
super-block's d (and dmin) is fitted to the integers, and the codes are computed again from the stored scales. Without
importances the squared error of a large weight counts more, as in ggml's encoder; the weighting was chosen for the
smallest error compared with ggml's (tests/export/test_gguf_llamacpp.py). Q6_K, which every mix uses for embeddings and
heads, is encoded as ggml does: fitting further lowers the error of the weights, but not the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..utils.errors import CheckpointError
from .fits import REFINEMENTS, Grid, fit_affine, fit_positive, fit_symmetric, inverse

Type = GGMLQuantizationType
FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
BLOCK = 32
WITH_IMPORTANCE = Grid(-0.9, 0.05, 36)
SUPER = 256


# --- blocks of 32 -----------------------------------------------------------------------------------------------------


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
    """Blocks [N, 32] → bytes [N, 34]. Rounds half away from zero; importances have no effect."""
    d = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * inverse(d)
    floor = scaled.abs().floor()
    codes = scaled.sign() * (floor + (2 * (scaled.abs() - floor)).floor())
    return torch.cat([as_bytes(d, torch.float16), as_bytes(codes, torch.int8)], -1)


def _block_symmetric(x: Tensor, importance: Tensor | None, levels: int) -> tuple[Tensor, Tensor]:
    if importance is None:
        d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -levels
        return d, (x * inverse(d) + (levels + 0.5)).trunc_().clamp_(0, 2 * levels - 1)
    d = fit_symmetric(x, importance, levels).half().float()
    return d, ((x * inverse(d)).round_() + levels).clamp_(0, 2 * levels - 1)


def _block_affine(x: Tensor, importance: Tensor | None, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    if importance is None:
        low = x.amin(-1, keepdim=True)
        d = (x.amax(-1, keepdim=True) - low) / levels
        return d, low, ((x - low) * inverse(d) + 0.5).trunc_().clamp_(0, levels)
    d, minus = (value.half().float() for value in fit_affine(x, importance, levels, WITH_IMPORTANCE))
    return d, -minus, ((x + minus) * inverse(d)).round_().clamp_(0, levels)


def q4_0(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 18]: d·(q - 8)."""
    d, codes = _block_symmetric(x, importance, 8)
    return torch.cat([as_bytes(d, torch.float16), nibbles(codes)], -1)


def q4_1(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 20]: d·q + m."""
    d, m, codes = _block_affine(x, importance, 15)
    return torch.cat([as_bytes(d, torch.float16), as_bytes(m, torch.float16), nibbles(codes)], -1)


def q5_0(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 22]: d·(q - 16)."""
    d, codes = _block_symmetric(x, importance, 16)
    return torch.cat([as_bytes(d, torch.float16), fifth_bits(codes), nibbles(codes)], -1)


def q5_1(x: Tensor, importance: Tensor | None) -> Tensor:
    """Blocks [N, 32] → bytes [N, 24]: d·q + m."""
    d, m, codes = _block_affine(x, importance, 31)
    fields = [as_bytes(d, torch.float16), as_bytes(m, torch.float16), fifth_bits(codes), nibbles(codes)]
    return torch.cat(fields, -1)


# --- K-quants ---------------------------------------------------------------------------------------------------------


def _stored_pair(s: Tensor, m: Tensor, weight: Tensor, top: int, exact: bool) -> tuple[Tensor, ...]:
    """Quantize scales and minima [N, subs, 1] to integers [N, subs, 1] up to `top`, with fp16 d and dmin [N, 1, 1].

    Args:
        exact: search for d, weighted by the sub-blocks' `weight`; else d is the largest value over `top`.
    """
    stored = []
    for value in (s.squeeze(-1), m.squeeze(-1)):
        if exact:
            d, codes = fit_positive(value, weight, top)
        else:
            d = value.amax(-1, keepdim=True) / top
            codes = (value * inverse(d)).round_().clamp_(0, top)
        stored += [codes.unsqueeze(-1), d.half().float().unsqueeze(-1)]
    return tuple(stored)


def _super_affine(
    x: Tensor, importance: Tensor | None, sub: int, levels: int, top: int, grid: Grid
) -> tuple[Tensor, ...]:
    """Super-blocks [N, 256] → codes [N, 256], sub-block scales and minima as integers [N, subs], d and dmin [N, 1]."""
    x = x.view(-1, SUPER // sub, sub)
    if importance is not None:
        weight, grid = importance.view_as(x), Grid(-0.9, 0.05, 36)
    elif levels == 3:
        weight = x.abs()
    else:
        weight = x.abs() + 2 * x.square().mean(-1, keepdim=True).sqrt()
    s, m = fit_affine(x, weight, levels, grid)
    scales, d, minima, dmin = _stored_pair(s, m, weight.sum(-1), top, importance is not None)
    codes = ((x + dmin * minima) * inverse(d * scales)).round_().clamp_(0, levels)
    d, dmin = _refit_pair(x, weight, codes * scales, minima.expand_as(codes), d, dmin)
    codes = ((x + dmin * minima) * inverse(d * scales)).round_().clamp_(0, levels)
    return codes.flatten(1), scales.squeeze(-1), minima.squeeze(-1), d.squeeze(-1), dmin.squeeze(-1)


def _refit_pair(x: Tensor, weight: Tensor, up: Tensor, down: Tensor, d: Tensor, dmin: Tensor) -> tuple[Tensor, Tensor]:
    """Refit d and dmin, rounded to fp16, to the smallest Σ w·(d·up - dmin·down - x)² over each super-block.

    Returns the given values where the fit is undefined (a super-block of zeros) or negative.
    """
    uu, vv, uv = ((weight * a * b).sum((-1, -2), keepdim=True) for a, b in ((up, up), (down, down), (up, down)))
    ux, vx = ((weight * a * x).sum((-1, -2), keepdim=True) for a in (up, down))
    determinant = uu * vv - uv.square()
    new_d, new_min = (ux * vv - vx * uv) / determinant, (ux * uv - vx * uu) / determinant
    sound = (determinant > 1e-6 * uu * vv) & (new_d > 0) & (new_min >= 0)
    return torch.where(sound, new_d, d).half().float(), torch.where(sound, new_min, dmin).half().float()


def _super_symmetric(x: Tensor, importance: Tensor | None, levels: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Super-blocks [N, 256] → codes [N, 256] in [0, 2·levels), sub-block scales in [-top, top) [N, 16], d [N, 1]."""
    x = x.view(-1, 16, 16)
    if importance is not None:
        weight = importance.view_as(x)
    else:
        weight = x.square() + (levels == 4) * x.square().mean(-1, keepdim=True)
    as_ggml = importance is None and levels == 32
    s = fit_symmetric(x, weight, levels, 0 if as_ggml else REFINEMENTS).squeeze(-1)
    if importance is None or top > 32:
        d = s.gather(-1, s.abs().argmax(-1, keepdim=True)) / -top
    else:
        d = fit_symmetric(s, weight.sum(-1), top)
    scales = (s * inverse(d)).round_().clamp_(-top, top - 1)
    step = scales.unsqueeze(-1)
    if as_ggml:
        d = d.half().float()
        codes = (x * inverse(d.unsqueeze(-1) * step)).round_().clamp_(-levels, levels - 1)
        return codes.flatten(1) + levels, scales, d
    codes = (x * inverse(d.unsqueeze(-1) * step)).round_().clamp_(-levels, levels - 1)
    along, norm = ((weight * codes * step * y).sum((-1, -2)) for y in (x, codes * step))
    d = torch.where(norm > 0, along / norm, d.squeeze(-1)).unsqueeze(-1).half().float()
    codes = (x * inverse(d.unsqueeze(-1) * step)).round_().clamp_(-levels, levels - 1)
    return codes.flatten(1) + levels, scales, d


def _bits(codes: Tensor, width: int, planes: int) -> Tensor:
    """Codes [N, planes · w] → bytes [N, w]: the p-th part of the codes in bits p·width to (p+1)·width - 1."""
    chunks = codes.to(torch.uint8).chunk(planes, -1)
    packed = chunks[0].clone()
    for plane, chunk in enumerate(chunks[1:], 1):
        packed |= chunk << (plane * width)
    return packed


def _halves(codes: Tensor, width: int, planes: int) -> Tensor:
    """Apply `_bits` to each 128 codes: 128/planes bytes each."""
    return _bits(codes.reshape(-1, 128), width, planes).view(codes.shape[0], -1)


def _six_bit_pairs(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight 6-bit scales and minima [N, 8] → bytes [N, 12]: the first four complete, with the other four's top bits."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4 << 6)
    second = m[:, :4] | (m[:, 4:] >> 4 << 6)
    third = s[:, 4:].bitwise_and(15) | (m[:, 4:].bitwise_and(15) << 4)
    return torch.cat([first, second, third], -1)


def q2_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 84]."""
    codes, scales, minima, d, dmin = _super_affine(x, importance, 16, 3, 15, Grid(-0.5, 0.1, 16))
    packed = scales.to(torch.uint8) | (minima.to(torch.uint8) << 4)
    return torch.cat([packed, _halves(codes, 2, 4), as_bytes(d, torch.float16), as_bytes(dmin, torch.float16)], -1)


def q3_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 110]."""
    codes, scales, d = _super_symmetric(x, importance, 4, 32)
    codes = codes.to(torch.uint8)
    shifted = (scales + 32).to(torch.uint8)
    low = shifted.bitwise_and(15)
    packed = torch.cat([low[:, :8] | (low[:, 8:] << 4), _bits(shifted >> 4, 2, 4)], -1)
    fields = [_bits(codes >> 2, 1, 8), _halves(codes.bitwise_and(3), 2, 4), packed, as_bytes(d, torch.float16)]
    return torch.cat(fields, -1)


def q4_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 144]."""
    codes, scales, minima, d, dmin = _super_affine(x, importance, 32, 15, 63, Grid(-1.0, 0.1, 21))
    packed = _bits(codes.view(-1, 64), 4, 2).view(codes.shape[0], -1)
    head = [as_bytes(d, torch.float16), as_bytes(dmin, torch.float16), _six_bit_pairs(scales, minima)]
    return torch.cat([*head, packed], -1)


def q5_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 176]."""
    codes, scales, minima, d, dmin = _super_affine(x, importance, 32, 31, 63, Grid(-0.5, 0.1, 16))
    codes = codes.to(torch.uint8)
    low = _bits(codes.bitwise_and(15).view(-1, 64), 4, 2).view(codes.shape[0], -1)
    head = [as_bytes(d, torch.float16), as_bytes(dmin, torch.float16), _six_bit_pairs(scales, minima)]
    return torch.cat([*head, _bits(codes >> 4, 1, 8), low], -1)


def q6_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 210]."""
    codes, scales, d = _super_symmetric(x, importance, 32, 128)
    codes = codes.to(torch.uint8)
    low, high = _halves(codes.bitwise_and(15), 4, 2), _halves(codes >> 4, 2, 4)
    return torch.cat([low, high, as_bytes(scales, torch.int8), as_bytes(d, torch.float16)], -1)


# --- all types --------------------------------------------------------------------------------------------------------

ENCODERS: dict[GGMLQuantizationType, Callable[[Tensor, Tensor | None], Tensor]] = {
    Type.Q8_0: q8_0,
    Type.Q4_0: q4_0,
    Type.Q4_1: q4_1,
    Type.Q5_0: q5_0,
    Type.Q5_1: q5_1,
    Type.Q2_K: q2_k,
    Type.Q3_K: q3_k,
    Type.Q4_K: q4_k,
    Type.Q5_K: q5_k,
    Type.Q6_K: q6_k,
}
# Values quantized at once: a search's temporaries fit a CPU's caches, or fill a GPU.
CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 26


def row_bytes(columns: int, type_: GGMLQuantizationType) -> int:
    """Bytes of one row of `columns` weights."""
    block, size = GGML_QUANT_SIZES[type_]
    return columns // block * size


@torch.no_grad()
def quantize(weight: Tensor, type_: GGMLQuantizationType, importance: Tensor | None = None) -> Tensor:
    """Encode a weight as ggml stores it.

    Args:
        weight: any float dtype, [..., columns]; columns a multiple of the type's block.
        importance: [columns], > 0: mean square of each column's input activation (an importance matrix). It weights the
            squared error, so that the expected error of the layer's output is minimised.

    Returns:
        uint8 [..., bytes of a row], on the weight's device.

    Raises:
        CheckpointError: the weight has NaN or Inf, or does not fit fp16.
    """
    if type_ in FLOATS:
        stored = weight.to(FLOATS[type_])
        _check_finite(weight)
        if not bool(stored.isfinite().all()):
            raise CheckpointError("a weight does not fit float16", "export to bf16 or f32")
        return stored.contiguous().view(torch.uint8)
    block, size = GGML_QUANT_SIZES[type_]
    rows = weight.reshape(-1, weight.shape[-1])
    out = torch.empty(rows.shape[0], rows.shape[1] // block * size, dtype=torch.uint8, device=weight.device)
    step = max(1, CHUNK.get(weight.device.type, CHUNK_ELSEWHERE) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        x = rows[start : start + step].float()
        _check_finite(x)
        weight_of_error = None if importance is None else importance.to(x).expand_as(x).reshape(-1, block)
        out[start : start + step] = ENCODERS[type_](x.reshape(-1, block), weight_of_error).view(x.shape[0], -1)
    return out.view(*weight.shape[:-1], -1)


def _check_finite(weight: Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise CheckpointError("a weight has NaN or Inf", "re-download the model, or train with a lower learning rate")
