"""Triton: conversion from and to FP8.

Dequantizing a value moves 3 bytes in bf16. E4M3 is decoded with integer operations, which GPUs without FP8 support,
too: its bits, shifted into fp16's exponent and mantissa, are the value times 2^-8, subnormals included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.float8 import FP8_MAX, TILE, Scaling, dequantize_float8
from ...ops import float8 as reference
from ..device import device_of
from ..operands import evenly_spaced
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

BLOCK = 4096  # values of a row per program
WARPS = 8
SIDE = 64  # side of the square that a program transposes
SMALLEST_AMAX = tl.constexpr(reference.SMALLEST_AMAX)


@triton.jit
def e4m3(codes):
    """Decode E4M3 bytes to fp32 with integer operations; NaN becomes 480."""
    bits = codes.to(tl.int16)
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _dequantize(
    codes_ptr, scale_ptr, out_ptr, width, rows, SCALING: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """`rows`: rows of one matrix of a stack; tiles do not cross matrices."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    values = e4m3(tl.load(codes_ptr + row * width + col, mask=mask, other=0))
    if SCALING == "tensor":
        scale = tl.load(scale_ptr)
    elif SCALING == "row":
        scale = tl.load(scale_ptr + row)
    else:
        tile_row = (row // rows) * tl.cdiv(rows, TILE) + (row % rows) // TILE
        scale = tl.load(scale_ptr + tile_row * tl.cdiv(width, TILE) + col // TILE, mask=mask, other=0.0)
    tl.store(
        out_ptr + row * width + col, (values * scale).to(out_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs"
    )


_dequantize_launcher = Launcher(_dequantize)


@dequantize_float8.kernel("cuda", "xpu")
def dequantize(codes: Tensor, scale: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if out.numel():
        width, rows = codes.shape[-1], codes.shape[-2] if codes.dim() > 1 else 1
        block = min(BLOCK, power_of_2(width))
        _dequantize_launcher(
            codes.numel() // width * ceil_div(width, block),
            (codes.contiguous().view(torch.uint8), scale.contiguous(), out),
            (width, rows),
            (scaling, TILE, block),
            WARPS,
        )
    return out


@triton.jit
def _load(x_ptr, factor_ptr, width, stride, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Load this program's block of a row in fp32; return it with its row, columns and mask."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    values = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        values *= tl.load(factor_ptr + col, mask=mask, other=0.0)
    return values, row, col, mask


@triton.jit
def largest(values):
    """Largest magnitude; NaN counts as Inf, since fmax would drop it."""
    return tl.max(tl.where(values == values, tl.abs(values), float("inf")))


@triton.jit
def observe(newest_ptr, amax):
    """Raise the number at `newest_ptr` to `amax`. Programs whose amax is not larger skip the atomic."""
    if amax > tl.load(newest_ptr):
        tl.atomic_max(newest_ptr, amax)


@triton.jit
def to_float8(values, scale, LIMIT: tl.constexpr):
    """values · scale, saturated. NaN is preserved; clamping alone would make a number of it."""
    scaled = values * scale
    return tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT), scaled)


@triton.jit
def _amax(x_ptr, factor_ptr, scale_ptr, amax_ptr, width, stride, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the amax of x if there is no scale yet. With a scale every program returns at once, without the host."""
    if tl.load(scale_ptr) <= 0:
        values, _, _, _ = _load(x_ptr, factor_ptr, width, stride, FACTORS, BLOCK)
        tl.atomic_max(amax_ptr, largest(values))


@triton.jit
def _cast(
    x_ptr, factor_ptr, scale_ptr, target_ptr, amax_ptr, newest_ptr, codes_ptr, inverse_ptr, width, stride, out_stride,
    LIMIT: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    values, row, col, mask = _load(x_ptr, factor_ptr, width, stride, FACTORS, BLOCK)
    observe(newest_ptr, largest(values))
    scale = tl.load(scale_ptr)
    if scale <= 0:
        amax = tl.load(amax_ptr)
        usable = (amax > 0) & (amax < float("inf"))
        scale = tl.where(usable, tl.div_rn(tl.load(target_ptr), tl.maximum(amax, SMALLEST_AMAX)), 1.0)
    codes = to_float8(values, scale, LIMIT).to(codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * out_stride + col, codes, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))


_amax_launcher = Launcher(_amax)
_cast_launcher = Launcher(_cast, enable_fp_fusion=False)


def float8_obstacle(tensor: Tensor, *_: Any, **__: Any) -> str | None:
    """Return why Triton cannot convert to E4M3 on this device, or None (NVIDIA from Ada on, Triton's interpreter)."""
    device = device_of(tensor)
    converts = device.backend == "cpu" or device.at_least((8, 9))
    return None if converts else "needs conversions to FP8: an NVIDIA GPU of compute capability 8.9 or newer"


def cast_obstacle(scale: Tensor, tensors: Sequence[Tensor], *_: Any, **__: Any) -> str | None:
    if not tensors[0].shape[0] * min(tensor.shape[1] for tensor in tensors):
        return "needs values"
    return float8_obstacle(scale)


@reference.cast_float8.kernel("cuda", "xpu", unless=cast_obstacle)
def cast_float8(
    scale: Tensor,
    tensors: Sequence[Tensor],
    factors: Tensor | None,
    target: Tensor,
    newest: Tensor,
    dtype: torch.dtype,
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    rows, widths = tensors[0].shape[0], [tensor.shape[1] for tensor in tensors]
    codes = torch.empty(rows, sum(widths), dtype=dtype, device=scale.device)
    inverse = torch.empty_like(scale)
    amax = scale if settled else scale.new_zeros(())
    columns = [scale] * len(tensors) if factors is None else factors.split(widths)
    spaced = [evenly_spaced(tensor) for tensor in tensors]
    blocks = [min(BLOCK, power_of_2(width)) for width in widths]
    with_factors = factors is not None
    if not settled:
        for (tensor, stride), column, block in zip(spaced, columns, blocks, strict=True):
            programs, shape = rows * ceil_div(tensor.shape[1], block), (tensor.shape[1], stride)
            _amax_launcher(programs, (tensor, column, scale, amax), shape, (with_factors, block), WARPS)
    outs = codes.split(widths, dim=1)
    for (tensor, stride), column, block, out in zip(spaced, columns, blocks, outs, strict=True):
        programs, numbers = rows * ceil_div(tensor.shape[1], block), (tensor.shape[1], stride, sum(widths))
        operands = (tensor, column, scale, target, amax, newest, out, inverse)
        _cast_launcher(programs, operands, numbers, (FP8_MAX[dtype], with_factors, block), WARPS)
    return codes, inverse


@triton.jit
def _transpose(codes_ptr, out_ptr, rows, width, out_stride, SIDE: tl.constexpr):
    across = tl.cdiv(width, SIDE)
    row = ((tl.program_id(0) // across) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    col = ((tl.program_id(0) % across) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    mask = (row[:, None] < rows) & (col[None, :] < width)
    square = tl.load(codes_ptr + row[:, None] * width + col[None, :], mask=mask, other=0)
    tl.store(out_ptr + col[:, None] * out_stride + row[None, :], tl.trans(square), mask=tl.trans(mask))


_transpose_launcher = Launcher(_transpose)


@reference.transpose_float8.kernel("cuda", "xpu")
def transpose_float8(codes: Tensor, out: Tensor | None = None) -> Tensor:
    rows, width = codes.shape
    out = torch.empty(width, rows, dtype=codes.dtype, device=codes.device) if out is None else out
    codes = codes.contiguous()
    if out.numel():
        programs = ceil_div(rows, SIDE) * ceil_div(width, SIDE)
        tensors = (codes.view(torch.uint8), out.view(torch.uint8))
        _transpose_launcher(programs, tensors, (rows, width, out.stride(0)), (SIDE,), warps=4)
    return out
