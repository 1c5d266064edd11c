"""Triton: optimizer steps of any number of parameters in one launch.

Addresses are read from a table on the device, since a kernel's arguments cannot be a list. A program updates one tile
of one parameter; `tiles` gives its parameter and tile. Tiles start at multiples of all blocks, so each scale belongs to
one program. The last tile of a parameter runs the same code with masks, which other tiles do not need.

Codes of dynamic8 are found without a search: the decade and the fraction give a code that is at most one off, which two
comparisons with the midpoints of the table correct.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.codebooks import dynamic_map
from ...ops import optimizer as reference
from ...ops.optimizer import RULES, SETTINGS, Coefficients, Parameters
from ...ops.optimizer_state import STORAGES, middles
from .. import parameter_tables
from ..operands import bump_versions
from ..parameter_tables import TILE, ends_of_tiles, tables
from ..tiling import ceil_div
from .launch import Launcher

PROGRAMS = 1024  # that sum the gradients' squares
WARPS = 4
SETTING = tl.constexpr(len(SETTINGS))
COEFFICIENTS = tl.constexpr(len(Coefficients._fields))
COLUMNS = tl.constexpr(parameter_tables.COLUMNS)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _squares(
    tiles_ptr, table_ptr, out_ptr, tiles, GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sum of the squares of the gradients in every PROGRAMS-th tile, fp32 [PROGRAMS]."""
    at = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for round in range(0, tiles, PROGRAMS):
        number = round + tl.program_id(0)
        inside = number < tiles
        tile = tiles_ptr + tl.minimum(number, tiles - 1) * 2
        entry = table_ptr + tl.load(tile).to(tl.int64) * COLUMNS
        start = tl.load(tile + 1).to(tl.int64) * TILE
        left = tl.where(inside, tl.load(entry) - start, 0)
        gradient = _pointer(tl.load(entry + 3), GRADIENT, ALIGNED) + start
        if left >= TILE:
            g = tl.load(gradient + at).to(tl.float32)
        else:
            g = tl.load(gradient + at, mask=at < left, other=0.0).to(tl.float32)
        total += g * g
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _norm(partial_ptr, out_ptr, count, max_norm, CLIPS: tl.constexpr, BLOCK: tl.constexpr):
    """The norm and the clipping factor from `count` partial sums."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, mask=at < count, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    tl.store(out_ptr, norm)
    factor = 1.0
    if CLIPS:
        factor = max_norm / (norm + 1e-6)
        factor = tl.where(factor > 1.0, 1.0, factor)  # NaN stays
    tl.store(out_ptr + 1, factor)


@triton.jit
def _power(base, t):
    """base^t in fp64; 0^t is 0."""
    return tl.where(base > 0, tl.exp(t * tl.log(tl.where(base > 0, base, 1.0))), 0.0)


@triton.jit
def _prepare(
    settings_ptr, groups_ptr, steps_ptr, out_ptr, factor_ptr, found_ptr, n,
    RULE: tl.constexpr, DECOUPLED: tl.constexpr, CORRECTS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_FOUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    steps = tl.load(steps_ptr + at, mask=mask, other=0.0)
    if HAS_FOUND:
        steps += tl.where(tl.load(found_ptr) == 0, 1.0, 0.0)
    else:
        steps += 1.0
    tl.store(steps_ptr + at, steps, mask=mask)
    t = steps.to(tl.float64)
    row = settings_ptr + tl.load(groups_ptr + at, mask=mask, other=0) * SETTING
    lr = tl.load(row, mask=mask, other=0.0)
    decay = tl.load(row + 1, mask=mask, other=0.0)
    beta1 = tl.load(row + 2, mask=mask, other=0.5)
    beta2 = tl.load(row + 3, mask=mask, other=0.5)
    beta3 = tl.load(row + 4, mask=mask, other=0.5)
    eps = tl.load(row + 5, mask=mask, other=0.0)
    alpha = tl.load(row + 6, mask=mask, other=0.0)
    unity = t * 0.0 + 1.0
    first = unity
    root = unity
    if CORRECTS:
        first = 1.0 / (1.0 - _power(beta1, t))
        root = 1.0 / tl.sqrt(1.0 - _power(beta2, t))
    if RULE == "ademamix":
        rise = tl.load(row + 7, mask=mask, other=0.0)
        horizon = tl.load(row + 8, mask=mask, other=0.0)
        alpha = tl.where(rise > 0, alpha * tl.minimum(t / tl.where(rise > 0, rise, 1.0), 1.0), alpha)
        share = tl.minimum(t / tl.maximum(horizon, 1.0), 1.0)
        low = tl.log(tl.where(beta1 > 0, beta1, 1.0))
        high = tl.log(tl.where(beta3 > 0, beta3, 1.0))
        grown = tl.exp(low * high / ((1.0 - share) * high + share * low))
        beta3 = tl.where(horizon > 0, tl.minimum(grown, beta3), beta3)
    if DECOUPLED:
        decay *= lr
    rate = lr
    if RULE == "adamw":
        rate *= first
    factor = unity
    if HAS_FACTOR:
        factor *= tl.load(factor_ptr)
    out = out_ptr + at * COEFFICIENTS
    tl.store(out, factor.to(tl.float32), mask=mask)
    tl.store(out + 1, decay.to(tl.float32), mask=mask)
    tl.store(out + 2, rate.to(tl.float32), mask=mask)
    tl.store(out + 3, root.to(tl.float32), mask=mask)
    tl.store(out + 4, eps.to(tl.float32), mask=mask)
    tl.store(out + 5, alpha.to(tl.float32), mask=mask)
    tl.store(out + 6, beta1.to(tl.float32), mask=mask)
    tl.store(out + 7, (1.0 - beta1).to(tl.float32), mask=mask)
    tl.store(out + 8, beta2.to(tl.float32), mask=mask)
    tl.store(out + 9, (1.0 - beta2).to(tl.float32), mask=mask)
    tl.store(out + 10, beta3.to(tl.float32), mask=mask)
    tl.store(out + 11, (1.0 - beta3).to(tl.float32), mask=mask)
    tl.store(out + 12, first.to(tl.float32), mask=mask)


@triton.jit
def _load(base, at, left, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(base + at, mask=at < left, other=0)
    return tl.load(base + at)


@triton.jit
def _store(base, at, values, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(base + at, values, mask=at < left)
    else:
        tl.store(base + at, values)


@triton.jit
def _pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _encode_dynamic(ratio, middles_ptr, SIGNED: tl.constexpr):
    """Codes of dynamic8 for |ratio| ≤ 1, as `Storage.encode`, int32."""
    size = tl.abs(ratio)
    decade = (
        (size > 1e-6).to(tl.int32) + (size > 1e-5).to(tl.int32) + (size > 1e-4).to(tl.int32)
        + (size > 1e-3).to(tl.int32) + (size > 1e-2).to(tl.int32) + (size > 1e-1).to(tl.int32)
    )  # fmt: skip
    # decade e covers (10^(e−7), 10^(e−6)] with 2^e equal cells, or 2^(e+1) in the unsigned map
    power = tl.exp2(decade.to(tl.float32))
    cells = power if SIGNED else power * 2.0
    inverse = tl.exp2(decade.to(tl.float32) * -3.321928094887362) * 1e6  # 10^(6−e)
    cell = (size * inverse - 0.1) * (cells / 0.9)
    cell = tl.minimum(tl.maximum(cell, 0.0), cells - 1.0).to(tl.int32)
    index = cells.to(tl.int32) + cell
    if SIGNED:
        code = tl.where(ratio < 0, 127 - index, 127 + index)
    else:
        code = index - 1
    above = tl.load(middles_ptr + tl.minimum(code, 254))
    below = tl.load(middles_ptr + tl.maximum(code - 1, 0))
    moved = code + (ratio > above).to(tl.int32) - (ratio <= below).to(tl.int32)
    code = tl.minimum(tl.maximum(moved, 0), 255)
    if SIGNED:
        code = tl.where((code == 127) & (ratio < 0), 126, code)
    return code


@triton.jit
def _decode(
    codes, scales, left, values_ptr, START, STORAGE: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One state of a tile: addresses → fp32 [TILE/BLOCK, BLOCK]."""
    row = tl.arange(0, TILE // BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * BLOCK + column
    if STORAGE == "fp32":
        return _load(_pointer(codes, tl.float32, ALIGNED) + START, at, left, MASKED)
    elif STORAGE == "bf16":
        return _load(_pointer(codes, tl.bfloat16, ALIGNED) + START, at, left, MASKED).to(tl.float32)
    else:
        blocks = (left + BLOCK - 1) // BLOCK
        if STORAGE == "companded8":
            scale = _load(_pointer(scales, tl.float16, False) + START // BLOCK, row, blocks, MASKED).to(tl.float32)
            if SIGNED:
                code = _load(_pointer(codes, tl.int8, ALIGNED) + START, at, left, MASKED)
                ratio = code.to(tl.float32) / 127.0
                return ratio / (2.0 - tl.abs(ratio)) * scale
            code = _load(_pointer(codes, tl.uint8, ALIGNED) + START, at, left, MASKED)
            value = code.to(tl.float32) / 255.0 * scale
            return value * value
        scale = _load(_pointer(scales, tl.float32, False) + START // BLOCK, row, blocks, MASKED)
        code = _load(_pointer(codes, tl.uint8, ALIGNED) + START, at, left, MASKED)
        return tl.load(values_ptr + code.to(tl.int32)) * scale


@triton.jit
def _encode(
    values, codes, scales, left, middles_ptr, START, STORAGE: tl.constexpr, SIGNED: tl.constexpr,
    SQUARE: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store one state of a tile, fp32 [TILE/BLOCK, BLOCK]."""
    row = tl.arange(0, TILE // BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * BLOCK + column
    if STORAGE == "fp32":
        _store(_pointer(codes, tl.float32, ALIGNED) + START, at, values, left, MASKED)
    elif STORAGE == "bf16":
        _store(_pointer(codes, tl.bfloat16, ALIGNED) + START, at, values.to(tl.bfloat16), left, MASKED)
    else:
        if STORAGE == "companded8" and not SIGNED:
            values = tl.sqrt(values)
        if MASKED:
            values = tl.where(at < left, values, 0.0)
        scale = tl.max(tl.abs(values), axis=1)[:, None]
        blocks = (left + BLOCK - 1) // BLOCK
        if STORAGE == "companded8":
            half = scale.to(tl.float16)
            _store(_pointer(scales, tl.float16, False) + START // BLOCK, row, half, blocks, MASKED)
            scale = half.to(tl.float32)
        else:
            _store(_pointer(scales, tl.float32, False) + START // BLOCK, row, scale, blocks, MASKED)
        ratio = tl.div_rn(values, tl.where(scale == 0, 1.0, scale))
        if STORAGE == "companded8":
            if SIGNED:
                ratio = tl.minimum(tl.maximum(ratio, -1.0), 1.0)
                ratio = tl.div_rn(2.0 * ratio, 1.0 + tl.abs(ratio)) * 127.0
                # adding and subtracting 1.5·2^23 rounds to the nearest even integer
                code = (ratio + 12582912.0 - 12582912.0).to(tl.int8)
                _store(_pointer(codes, tl.int8, ALIGNED) + START, at, code, left, MASKED)
            else:
                ratio = tl.minimum(ratio, 1.0) * 255.0
                code = (ratio + 12582912.0 - 12582912.0).to(tl.int32)
                code = tl.where(values > 0, tl.maximum(code, 1), code).to(tl.uint8)
                _store(_pointer(codes, tl.uint8, ALIGNED) + START, at, code, left, MASKED)
        else:
            code = _encode_dynamic(ratio, middles_ptr, SIGNED)
            if SQUARE:
                code = tl.where(values > 0, tl.maximum(code, 128 if SIGNED else 1), code)
            _store(_pointer(codes, tl.uint8, ALIGNED) + START, at, code.to(tl.uint8), left, MASKED)


@triton.jit
def _hash32(element, step, number):
    """`ops.optimizer.hash32` of int64 elements, as uint32."""
    x = (element ^ (element >> 32)).to(tl.uint32) ^ step.to(tl.int64).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16) ^ number.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _full_weight(
    entry, at, start, left, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Weights of a tile with their corrections, fp32."""
    p = _load(_pointer(tl.load(entry + 2), WEIGHT, ALIGNED) + start, at, left, MASKED).to(tl.float32)
    if ROUNDING == "correction8" or ROUNDING == "correction16":
        if ROUNDING == "correction8":
            correction = _pointer(tl.load(entry + 4), tl.int8, ALIGNED) + start
            error = _load(correction, at, left, MASKED).to(tl.int32) << 8
        else:
            correction = _pointer(tl.load(entry + 4), tl.int16, ALIGNED) + start
            error = _load(correction, at, left, MASKED).to(tl.int32)
        p = (p.to(tl.int32, bitcast=True) + error).to(tl.float32, bitcast=True)
    return p


@triton.jit
def _trust_tile(
    entry, coefficients_ptr, values1_ptr, values2_ptr, out_ptr, start, left,
    RULE: tl.constexpr, TRUST: tl.constexpr, STORAGE: tl.constexpr, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store two sums of squares of a tile: of the weights, and of the update, momentum or gradient (see `TRUSTS`)."""
    at = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    c = coefficients_ptr + tl.load(entry + 1) * COEFFICIENTS
    p = _full_weight(entry, at, start, left, ROUNDING, WEIGHT, ALIGNED, MASKED)
    u = _load(_pointer(tl.load(entry + 3), GRADIENT, ALIGNED) + start, at, left, MASKED).to(tl.float32) * tl.load(c)
    if TRUST != "lars":
        codes1, scales1 = tl.load(entry + 5), tl.load(entry + 6)
        s1 = _decode(codes1, scales1, left, values1_ptr, start, STORAGE, True, ALIGNED, MASKED, TILE, BLOCK)
        decay = tl.load(c + 1)
        beta1 = tl.load(c + 6)
        rest1 = tl.load(c + 7)
        if RULE == "adamw":
            codes2, scales2 = tl.load(entry + 7), tl.load(entry + 8)
            s2 = _decode(codes2, scales2, left, values2_ptr, start, STORAGE, False, ALIGNED, MASKED, TILE, BLOCK)
            s2 = tl.load(c + 8) * s2 + tl.load(c + 9) * u * u
            size = tl.load(c + 2) if TRUST == "lamb" else tl.load(c + 12)
            u = size * (beta1 * s1 + rest1 * u) / (tl.sqrt(s2) * tl.load(c + 3) + tl.load(c + 4))
            if TRUST == "lamb":
                u += decay * p
        else:
            u = beta1 * s1 + (u + decay * p)
    if MASKED:
        u = tl.where(at < left, u, 0.0)
    tl.store(out_ptr, tl.sum(tl.sum(p * p, axis=1), axis=0))
    tl.store(out_ptr + 1, tl.sum(tl.sum(u * u, axis=1), axis=0))


@triton.jit
def _trust(
    tiles_ptr, table_ptr, coefficients_ptr, values1_ptr, values2_ptr, out_ptr,
    RULE: tl.constexpr, TRUST: tl.constexpr, STORAGE: tl.constexpr, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tiles_ptr + tl.program_id(0) * 2
    entry = table_ptr + tl.load(tile).to(tl.int64) * COLUMNS
    start = tl.load(tile + 1).to(tl.int64) * TILE
    left = tl.load(entry) - start
    out = out_ptr + tl.program_id(0) * 2
    if left >= TILE:
        _trust_tile(
            entry, coefficients_ptr, values1_ptr, values2_ptr, out, start, left,
            RULE, TRUST, STORAGE, ROUNDING, WEIGHT, GRADIENT, ALIGNED, False, TILE, BLOCK,
        )  # fmt: skip
    else:
        _trust_tile(
            entry, coefficients_ptr, values1_ptr, values2_ptr, out, start, left,
            RULE, TRUST, STORAGE, ROUNDING, WEIGHT, GRADIENT, ALIGNED, True, TILE, BLOCK,
        )  # fmt: skip


@triton.jit
def _ratio(partial_ptr, ends_ptr, table_ptr, coefficients_ptr, out_ptr, TRUST: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of one parameter's tiles and multiply its coefficients by the trust ratio."""
    first = tl.load(ends_ptr + tl.program_id(0))
    last = tl.load(ends_ptr + tl.program_id(0) + 1)
    weights = tl.zeros((BLOCK,), tl.float32)
    updates = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weights += tl.load(partial_ptr + at * 2, mask=at < last, other=0.0)
        updates += tl.load(partial_ptr + at * 2 + 1, mask=at < last, other=0.0)
    row = tl.load(table_ptr + tl.program_id(0) * COLUMNS + 1)
    weight = tl.sum(weights)
    update = tl.sum(updates)
    tl.store(out_ptr + row * 2, weight)
    tl.store(out_ptr + row * 2 + 1, update)
    weight = tl.sqrt(weight)
    update = tl.sqrt(update)
    c = coefficients_ptr + row * COEFFICIENTS
    scale = tl.load(c)
    decay = tl.load(c + 1)
    rate = tl.load(c + 2)
    alpha = tl.load(c + 5)
    if TRUST == "clip":
        limit = alpha * weight
        clips = update > limit
        ratio = tl.where(clips, limit / tl.where(clips, update, 1.0), 1.0)
    else:
        if TRUST == "lamb":
            ratio = rate / tl.load(c + 12) * weight
            under = update
        else:
            ratio = alpha * weight
            under = update + decay * weight
        compares = (weight > 0) & (update > 0)
        ratio = tl.where(compares, ratio / tl.where(compares, under, 1.0), 1.0)
    if TRUST == "lars":
        tl.store(c, scale * ratio)
    else:
        tl.store(c + 2, rate * ratio)
    if TRUST != "clip":
        tl.store(c + 1, decay * ratio)


@triton.jit
def _update_tile(
    entry, coefficients_ptr, steps_ptr, values1_ptr, middles1_ptr, values2_ptr, middles2_ptr, start, left,
    RULE: tl.constexpr, STORAGE: tl.constexpr, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one tile. `values1`, `middles1`: tables of the signed map; `values2`, `middles2`: of the unsigned map."""
    number = tl.load(entry + 1)
    at = tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    c = coefficients_ptr + number * COEFFICIENTS
    decay, rate = tl.load(c + 1), tl.load(c + 2)
    beta1, rest1 = tl.load(c + 6), tl.load(c + 7)
    p = _full_weight(entry, at, start, left, ROUNDING, WEIGHT, ALIGNED, MASKED)
    g = _load(_pointer(tl.load(entry + 3), GRADIENT, ALIGNED) + start, at, left, MASKED).to(tl.float32)
    g *= tl.load(c)
    codes1, scales1 = tl.load(entry + 5), tl.load(entry + 6)
    SQUARE1: tl.constexpr = RULE == "rmsprop" or RULE == "adagrad"
    s1 = _decode(codes1, scales1, left, values1_ptr, start, STORAGE, True, ALIGNED, MASKED, TILE, BLOCK)
    if RULE == "adamw" or RULE == "ademamix":
        beta2 = tl.load(c + 8)
        rest2 = tl.load(c + 9)
        root = tl.load(c + 3)
        eps = tl.load(c + 4)
        codes2, scales2 = tl.load(entry + 7), tl.load(entry + 8)
        p -= decay * p
        s1 = beta1 * s1 + rest1 * g
        if RULE == "adamw":
            s2 = _decode(codes2, scales2, left, values2_ptr, start, STORAGE, False, ALIGNED, MASKED, TILE, BLOCK)
            s2 = beta2 * s2 + rest2 * g * g
            p -= rate * s1 / (tl.sqrt(s2) * root + eps)
            _encode(s2, codes2, scales2, left, middles2_ptr, start, STORAGE, False, True, ALIGNED, MASKED, TILE, BLOCK)
        else:
            codes3, scales3 = tl.load(entry + 9), tl.load(entry + 10)
            s2 = _decode(codes2, scales2, left, values1_ptr, start, STORAGE, True, ALIGNED, MASKED, TILE, BLOCK)
            s3 = _decode(codes3, scales3, left, values2_ptr, start, STORAGE, False, ALIGNED, MASKED, TILE, BLOCK)
            s2 = tl.load(c + 10) * s2 + tl.load(c + 11) * g
            s3 = beta2 * s3 + rest2 * g * g
            p -= rate * (s1 * tl.load(c + 12) + tl.load(c + 5) * s2) / (tl.sqrt(s3) * root + eps)
            _encode(s2, codes2, scales2, left, middles1_ptr, start, STORAGE, True, False, ALIGNED, MASKED, TILE, BLOCK)
            _encode(s3, codes3, scales3, left, middles2_ptr, start, STORAGE, False, True, ALIGNED, MASKED, TILE, BLOCK)
    elif RULE == "lion":
        p -= decay * p
        direction = beta1 * s1 + rest1 * g
        p -= rate * ((direction > 0).to(tl.float32) - (direction < 0).to(tl.float32))
        s1 = tl.load(c + 8) * s1 + tl.load(c + 9) * g
    else:
        g += decay * p
        if RULE == "momentum":
            s1 = beta1 * s1 + g
            p -= rate * s1
        else:
            if RULE == "rmsprop":
                s1 = beta1 * s1 + rest1 * g * g
            else:
                s1 += g * g
            p -= rate * g / (tl.sqrt(s1) + tl.load(c + 4))
    _encode(s1, codes1, scales1, left, middles1_ptr, start, STORAGE, True, SQUARE1, ALIGNED, MASKED, TILE, BLOCK)
    weight = _pointer(tl.load(entry + 2), WEIGHT, ALIGNED) + start
    if ROUNDING == "nearest":
        _store(weight, at, p.to(WEIGHT), left, MASKED)
    else:
        bits = p.to(tl.int32, bitcast=True)
        if ROUNDING == "stochastic":
            element = tl.load(entry + 12) + start + at.to(tl.int64)
            noise = _hash32(element, tl.load(steps_ptr + number), tl.load(entry + 11)) & 0xFFFF
            bits = (bits + noise.to(tl.int32)) & -65536
        else:
            if ROUNDING == "correction8":
                bits = (bits + 0x80) & -256
            near = (bits + 0x8000) & -65536
            if ROUNDING == "correction8":
                correction = _pointer(tl.load(entry + 4), tl.int8, ALIGNED) + start
                _store(correction, at, ((bits - near) >> 8).to(tl.int8), left, MASKED)
            else:
                correction = _pointer(tl.load(entry + 4), tl.int16, ALIGNED) + start
                _store(correction, at, (bits - near).to(tl.int16), left, MASKED)
            bits = near
        _store(weight, at, bits.to(tl.float32, bitcast=True).to(WEIGHT), left, MASKED)


@triton.jit
def _update(
    tiles_ptr, table_ptr, coefficients_ptr, steps_ptr, found_ptr, values1_ptr, middles1_ptr, values2_ptr, middles2_ptr,
    RULE: tl.constexpr, STORAGE: tl.constexpr, ROUNDING: tl.constexpr, WEIGHT: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, HAS_FOUND: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if HAS_FOUND:  # noqa: SIM102  (a constant of the compiler, unlike the inner condition)
        if tl.load(found_ptr) != 0:
            return
    tile = tiles_ptr + tl.program_id(0) * 2
    entry = table_ptr + tl.load(tile).to(tl.int64) * COLUMNS
    start = tl.load(tile + 1).to(tl.int64) * TILE
    left = tl.load(entry) - start
    if left >= TILE:
        _update_tile(
            entry, coefficients_ptr, steps_ptr, values1_ptr, middles1_ptr, values2_ptr, middles2_ptr, start, left,
            RULE, STORAGE, ROUNDING, WEIGHT, GRADIENT, ALIGNED, False, TILE, BLOCK,
        )  # fmt: skip
    else:
        _update_tile(
            entry, coefficients_ptr, steps_ptr, values1_ptr, middles1_ptr, values2_ptr, middles2_ptr, start, left,
            RULE, STORAGE, ROUNDING, WEIGHT, GRADIENT, ALIGNED, True, TILE, BLOCK,
        )  # fmt: skip


_squares_launcher = Launcher(_squares)
_norm_launcher = Launcher(_norm)
_prepare_launcher = Launcher(_prepare)
_trust_launcher = Launcher(_trust)
_ratio_launcher = Launcher(_ratio)
# Without FMAs, since the compiler would choose them differently in full and in last tiles: the result of an element
# must not depend on where a parameter is cut, by `shard` or by windows of offloaded state.
_update_launcher = Launcher(_update, enable_fp_fusion=False)


@reference.gradient_norm.kernel("cuda", "xpu")
def gradient_norm(coefficients: Tensor, parameters: Sequence[Parameters], max_norm: float) -> Tensor:
    device = coefficients.device
    partial = torch.empty(len(parameters), PROGRAMS, device=device)
    for group, sums in zip(parameters, partial, strict=True):
        tiles, table, aligned = tables(group, device)
        dtype = DTYPES[group.gradients[0].dtype]
        _squares_launcher(PROGRAMS, (tiles, table, sums), (len(tiles),), (dtype, aligned, PROGRAMS, TILE), WARPS)
    out = torch.empty(2, device=device)
    clips = math.isfinite(max_norm)
    _norm_launcher(1, (partial, out), (partial.numel(), max_norm if clips else 0.0), (clips, 1024), 4)
    return out


@reference.prepare_step.kernel("cuda", "xpu")
def prepare_step(
    settings: Tensor,
    groups: Tensor,
    steps: Tensor,
    coefficients: Tensor,
    rule: str,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    n, block = len(steps), 128
    chosen = RULES[rule]
    _prepare_launcher(
        ceil_div(n, block),
        (settings, groups, steps, coefficients, _or(factor, steps), _or(found_inf, steps)),
        (n,),
        (rule, chosen.decoupled, chosen.corrects_bias, factor is not None, found_inf is not None, block),
        4,
    )


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    return unused if tensor is None else tensor


@reference.scale_by_trust.kernel("cuda", "xpu")
def scale_by_trust(coefficients: Tensor, parameters: Sequence[Parameters], trust: str) -> Tensor:
    device = coefficients.device
    squares = torch.zeros(len(coefficients), 2, device=device)
    for group in parameters:
        storage = STORAGES[group.storage]
        tiles, table, aligned = tables(group, device)
        ends = ends_of_tiles(group, device)
        partial = torch.empty(len(tiles), 2, device=device)
        values1, _, values2, _ = _code_tables(device)
        if len(tiles):
            _trust_launcher(
                len(tiles),
                (tiles, table, coefficients, values1, values2, partial),
                (),
                (
                    *(group.rule, trust, group.storage, group.rounding),
                    *(DTYPES[group.weights[0].dtype], DTYPES[group.gradients[0].dtype]),
                    *(aligned, TILE, storage.block or 256),
                ),
                WARPS,
            )
        if group.weights:
            tensors = (partial, ends, table, coefficients, squares)
            _ratio_launcher(len(group.weights), tensors, (), (trust, 256), WARPS)
    bump_versions(coefficients)
    return squares


@reference.update_parameters.kernel("cuda", "xpu")
def update_parameters(coefficients: Tensor, steps: Tensor, parameters: Parameters, found_inf: Tensor | None) -> None:
    storage = STORAGES[parameters.storage]
    tiles, table, aligned = tables(parameters, coefficients.device)
    if not len(tiles):
        return
    codes = _code_tables(coefficients.device)
    _update_launcher(
        len(tiles),
        (tiles, table, coefficients, steps, _or(found_inf, steps), *codes),
        (),
        (
            *(parameters.rule, parameters.storage, parameters.rounding),
            *(DTYPES[parameters.weights[0].dtype], DTYPES[parameters.gradients[0].dtype]),
            *(aligned, found_inf is not None, TILE, storage.block or 256),
        ),
        WARPS,
    )
    bump_versions(*parameters.weights)


@functools.cache
def _code_tables(device: torch.device) -> tuple[Tensor, ...]:
    """Values and midpoints of the codes, signed then unsigned."""
    maps = [dynamic_map(signed=signed).to(device) for signed in (True, False)]
    return tuple(table for values in maps for table in (values, middles(values)))
