"""Triton twins of `halfbyte.ops.float8`.

Dequantizing a value moves 3 bytes in bf16. E4M3 is decoded with integers, which GPUs without FP8 can do too: its bits,
shifted into fp16's exponent and mantissa, are the value times 2^-8, subnormals included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops import float8 as reference
from ..ops.float8 import FP8_MAX, TILE, Scaling
from .launch import Launcher, ceil_div, evenly_spaced, power_of_2

BLOCK = 4096  # values of a row that a program takes
WARPS = 8
SIDE = 64  # of the square that a program transposes
SMALLEST_AMAX = tl.constexpr(reference.SMALLEST_AMAX)


@triton.jit
def _dequantize(
    codes_ptr, scale_ptr, out_ptr, width, rows, SCALING: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    """`rows` are those of one matrix of a stack: tiles do not cross matrices."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    bits = tl.load(codes_ptr + row * width + col, mask=mask, other=0).to(tl.int16)
    half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
    if SCALING == "tensor":
        scale = tl.load(scale_ptr)
    elif SCALING == "row":
        scale = tl.load(scale_ptr + row)
    else:
        tile_row = (row // rows) * tl.cdiv(rows, TILE) + (row % rows) // TILE
        scale = tl.load(scale_ptr + tile_row * tl.cdiv(width, TILE) + col // TILE, mask=mask, other=0.0)
    values = half.to(tl.float32) * 256.0 * scale
    tl.store(out_ptr + row * width + col, values.to(out_ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")


_dequantize_launcher = Launcher(_dequantize)


@reference.dequantize_float8.twin("cuda", "xpu")
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
    """fp32 values of the block of a row that this program takes, with their place in the result and their mask."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    values = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    if FACTORS:
        values *= tl.load(factor_ptr + col, mask=mask, other=0.0)
    return values, row * width + col, mask


@triton.jit
def _largest(values):
    """fmax would drop NaN, which counts as Inf."""
    return tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=0)


@triton.jit
def _amax(x_ptr, factor_ptr, scale_ptr, amax_ptr, width, stride, FACTORS: tl.constexpr, BLOCK: tl.constexpr):
    """The amax of x where there is no scale yet; with one, every program ends at once, and nothing asks the host."""
    if tl.load(scale_ptr) <= 0:
        values, _, _ = _load(x_ptr, factor_ptr, width, stride, FACTORS, BLOCK)
        tl.atomic_max(amax_ptr, _largest(values))


@triton.jit
def _cast(
    x_ptr, factor_ptr, scale_ptr, target_ptr, amax_ptr, newest_ptr, codes_ptr, inverse_ptr, width, stride,
    LIMIT: tl.constexpr, FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    values, place, mask = _load(x_ptr, factor_ptr, width, stride, FACTORS, BLOCK)
    tl.atomic_max(newest_ptr, _largest(values))
    scale = tl.load(scale_ptr)
    if scale <= 0:
        amax = tl.load(amax_ptr)
        usable = (amax > 0) & (amax < float("inf"))
        scale = tl.where(usable, tl.div_rn(tl.load(target_ptr), tl.maximum(amax, SMALLEST_AMAX)), 1.0)
    # NaN must stay NaN: clamping with minimum and maximum would make a number of it.
    scaled = values * scale
    clamped = tl.where(scaled == scaled, tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT), scaled)
    tl.store(codes_ptr + place, clamped.to(codes_ptr.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0:
        tl.store(inverse_ptr, tl.div_rn(1.0, scale))


_amax_launcher = Launcher(_amax)
_cast_launcher = Launcher(_cast, enable_fp_fusion=False)


def casts_float8(device: torch.device) -> bool:
    """Whether Triton converts to E4M3 there: NVIDIA from compute capability 8.9, and its interpreter."""
    return device.type == "cpu" or (
        device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 9)
    )


@reference.cast_float8.twin("cuda", "xpu")
def cast_float8(
    x: Tensor, factors: Tensor | None, scale: Tensor, target: Tensor, newest: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if not casts_float8(x.device) or not x.numel():
        return reference.cast_float8.reference(x, factors, scale, target, newest, dtype)
    x, stride = evenly_spaced(x)
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=dtype, device=x.device)
    amax, inverse = scale.new_zeros(()), torch.empty_like(scale)
    block = min(BLOCK, power_of_2(width))
    programs, numbers = rows * ceil_div(width, block), (width, stride)
    column = scale if factors is None else factors
    _amax_launcher(programs, (x, column, scale, amax), numbers, (factors is not None, block), WARPS)
    tensors = (x, column, scale, target, amax, newest, codes, inverse)
    _cast_launcher(programs, tensors, numbers, (FP8_MAX[dtype], factors is not None, block), WARPS)
    return codes, inverse


@triton.jit
def _transpose(codes_ptr, out_ptr, rows, width, SIDE: tl.constexpr):
    across = tl.cdiv(width, SIDE)
    row = ((tl.program_id(0) // across) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    col = ((tl.program_id(0) % across) * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    mask = (row[:, None] < rows) & (col[None, :] < width)
    square = tl.load(codes_ptr + row[:, None] * width + col[None, :], mask=mask, other=0)
    tl.store(out_ptr + col[:, None] * rows + row[None, :], tl.trans(square), mask=tl.trans(mask))


_transpose_launcher = Launcher(_transpose)


@reference.transpose_float8.twin("cuda", "xpu")
def transpose_float8(codes: Tensor) -> Tensor:
    rows, width = codes.shape
    out = torch.empty(width, rows, dtype=torch.uint8, device=codes.device)
    if out.numel():
        programs = ceil_div(rows, SIDE) * ceil_div(width, SIDE)
        _transpose_launcher(programs, (codes.contiguous().view(torch.uint8), out), (rows, width), (SIDE,), warps=4)
    return out.view(codes.dtype)
