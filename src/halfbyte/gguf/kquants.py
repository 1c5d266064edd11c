"""ggml's K-quants: super-blocks of 256 weights, whose sub-blocks of 16 or 32 have scales (and minima) in 4 to 8 bits.

| type | sub-block | value             | sub-block scales | bits a weight |
|------|-----------|-------------------|------------------|---------------|
| Q2_K | 16        | d·s·q - dmin·m    | 4 bits each      | 2.625         |
| Q3_K | 16        | d·s·(q - 4)       | 6 bits, signed   | 3.4375        |
| Q4_K | 32        | d·s·q - dmin·m    | 6 bits each      | 4.5           |
| Q5_K | 32        | d·s·q - dmin·m    | 6 bits each      | 5.5           |
| Q6_K | 16        | d·s·(q - 32)      | 8 bits, signed   | 6.5625        |

d and dmin are fp16. Layouts: ggml-common.h (block_q2_K … block_q6_K). The scale searches are in `fits`; after them the
super-block's d (and dmin) is fitted to the integers, and the codes are taken once more, from the scales as they are
stored. Without importances the squared error of a weight counts more the larger the weight is, as in ggml's encoder;
how much was chosen for the smallest error beside ggml's (tests/export/test_gguf_llamacpp.py). Q6_K, which every mix has
embeddings and heads in, is encoded as ggml does: fitting further lowers the error of the weights and not the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block_quants import as_bytes
from .fits import REFINEMENTS, Grid, fit_affine, fit_positive, fit_symmetric, inverse

SUPER = 256


def _stored_pair(s: Tensor, m: Tensor, weight: Tensor, top: int, exact: bool) -> tuple[Tensor, ...]:
    """Scales and minima [N, subs, 1] → their integers [N, subs, 1], up to `top`, and the fp16 d and dmin [N, 1, 1].

    `exact`: search for d (by the sub-blocks' `weight`) instead of taking the largest over `top`.
    """
    found = []
    for value in (s.squeeze(-1), m.squeeze(-1)):
        if exact:
            d, codes = fit_positive(value, weight, top)
        else:
            d = value.amax(-1, keepdim=True) / top
            codes = (value * inverse(d)).round_().clamp_(0, top)
        found += [codes.unsqueeze(-1), d.half().float().unsqueeze(-1)]
    return tuple(found)


def _affine(x: Tensor, importance: Tensor | None, sub: int, levels: int, top: int, grid: Grid) -> tuple[Tensor, ...]:
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
    """The d and dmin, rounded to fp16, with the smallest Σ w·(d·up - dmin·down - x)² over each super-block.

    Where that is not defined (a super-block of zeros) or negative, those given.
    """
    uu, vv, uv = ((weight * a * b).sum((-1, -2), keepdim=True) for a, b in ((up, up), (down, down), (up, down)))
    ux, vx = ((weight * a * x).sum((-1, -2), keepdim=True) for a in (up, down))
    determinant = uu * vv - uv.square()
    new_d, new_min = (ux * vv - vx * uv) / determinant, (ux * uv - vx * uu) / determinant
    sound = (determinant > 1e-6 * uu * vv) & (new_d > 0) & (new_min >= 0)
    found = (torch.where(sound, new_d, d), torch.where(sound, new_min, dmin))
    return found[0].half().float(), found[1].half().float()


def _symmetric(x: Tensor, importance: Tensor | None, levels: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
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
    """Codes [N, planes · w] → bytes [N, w]: plane p of the codes in bits p·width …, the planes one after another."""
    parts = codes.to(torch.uint8).chunk(planes, -1)
    packed = parts[0].clone()
    for plane, part in enumerate(parts[1:], 1):
        packed |= part << (plane * width)
    return packed


def _halves(codes: Tensor, width: int, planes: int) -> Tensor:
    """`_bits` of each 128 codes, 32·(4/planes) bytes a plane."""
    return _bits(codes.reshape(-1, 128), width, planes).view(codes.shape[0], -1)


def _six_bit_pairs(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight 6-bit scales and minima [N, 8] → bytes [N, 12]: the low four of each whole, with the others' top bits."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4 << 6)
    second = m[:, :4] | (m[:, 4:] >> 4 << 6)
    third = s[:, 4:].bitwise_and(15) | (m[:, 4:].bitwise_and(15) << 4)
    return torch.cat([first, second, third], -1)


def q2_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 84]."""
    codes, scales, minima, d, dmin = _affine(x, importance, 16, 3, 15, Grid(-0.5, 0.1, 16))
    packed = scales.to(torch.uint8) | (minima.to(torch.uint8) << 4)
    return torch.cat([packed, _halves(codes, 2, 4), as_bytes(d, torch.float16), as_bytes(dmin, torch.float16)], -1)


def q3_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 110]."""
    codes, scales, d = _symmetric(x, importance, 4, 32)
    whole = codes.to(torch.uint8)
    shifted = (scales + 32).to(torch.uint8)
    low = shifted.bitwise_and(15)
    packed = torch.cat([low[:, :8] | (low[:, 8:] << 4), _bits(shifted >> 4, 2, 4)], -1)
    parts = [_bits(whole >> 2, 1, 8), _halves(whole.bitwise_and(3), 2, 4), packed, as_bytes(d, torch.float16)]
    return torch.cat(parts, -1)


def q4_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 144]."""
    codes, scales, minima, d, dmin = _affine(x, importance, 32, 15, 63, Grid(-1.0, 0.1, 21))
    packed = _bits(codes.view(-1, 64), 4, 2).view(codes.shape[0], -1)
    head = [as_bytes(d, torch.float16), as_bytes(dmin, torch.float16), _six_bit_pairs(scales, minima)]
    return torch.cat([*head, packed], -1)


def q5_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 176]."""
    codes, scales, minima, d, dmin = _affine(x, importance, 32, 31, 63, Grid(-0.5, 0.1, 16))
    whole = codes.to(torch.uint8)
    low = _bits(whole.bitwise_and(15).view(-1, 64), 4, 2).view(codes.shape[0], -1)
    head = [as_bytes(d, torch.float16), as_bytes(dmin, torch.float16), _six_bit_pairs(scales, minima)]
    return torch.cat([*head, _bits(whole >> 4, 1, 8), low], -1)


def q6_k(x: Tensor, importance: Tensor | None) -> Tensor:
    """Super-blocks [N, 256] → bytes [N, 210]."""
    codes, scales, d = _symmetric(x, importance, 32, 128)
    whole = codes.to(torch.uint8)
    low, high = _halves(whole.bitwise_and(15), 4, 2), _halves(whole >> 4, 2, 4)
    return torch.cat([low, high, as_bytes(scales, torch.int8), as_bytes(d, torch.float16)], -1)
