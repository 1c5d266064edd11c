"""Triton: int8 quantization by row, dequantization and scaling of products, in the reference's order in fp32.

All are bound by memory: dequantizing a value moves 3 bytes in bf16, quantizing one 3 and a second read from cache,
scaling a product 6. A program computes one row, or a block of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import int8 as reference
from ..operands import evenly_spaced
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

BLOCK = 4096  # values of a row that a program reads at a time
WARPS = 8
# Adding and subtracting this rounds fp32 values below 2^22 to integers, halves to even, on any device.
ROUNDER = tl.constexpr(1.5 * 2**23)
SMALLEST = tl.constexpr(reference.SMALLEST)
INVERSE_127 = tl.constexpr(reference.INVERSE_127)
INVERSE_127_SQUARED = tl.constexpr(reference.INVERSE_127_SQUARED)


@triton.jit
def _quantize(
    x_ptr, chosen_ptr, codes_ptr, absmax_ptr, width, stride, threshold, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x_ptr + row * stride + col, mask=col < width, other=0.0).to(tl.float32))
        if SPLIT:
            chosen = tl.load(chosen_ptr + col, mask=col < width, other=0)
            size = tl.where((chosen != 0) & (size >= threshold), 0.0, size)
        # NaN must reach absmax, and through it the product: fmax would drop it.
        largest = tl.maximum(largest, tl.where(size == size, size, float("inf")))
    absmax = tl.max(largest, axis=0)
    tl.store(absmax_ptr + row, absmax)
    floor = tl.maximum(tl.zeros((BLOCK,), tl.float32) + absmax, SMALLEST)
    factor = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), floor) * 127.0  # torch's rounding of 127 / absmax
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + row * stride + col, mask=col < width, other=0.0).to(tl.float32)
        codes = (values * factor + ROUNDER) - ROUNDER
        if SPLIT:
            chosen = tl.load(chosen_ptr + col, mask=col < width, other=0)
            codes = tl.where(chosen != 0, 0.0, codes)
        tl.store(codes_ptr + row * width + col, codes.to(tl.int8), mask=col < width)


_quantize_launcher = Launcher(_quantize, enable_fp_fusion=False)


@reference.quantize_rows_int8.kernel("cuda", "xpu")
def quantize_rows_int8(x: Tensor, chosen: Tensor | None, threshold: float) -> tuple[Tensor, Tensor]:
    reference.check_matrix("x", x)
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    absmax = torch.empty(rows, dtype=torch.float32, device=x.device)
    if codes.numel():
        x, stride = evenly_spaced(x)
        mask = codes if chosen is None else chosen.view(torch.int8)
        constants = (chosen is not None, min(BLOCK, power_of_2(width)))
        _quantize_launcher(rows, (x, mask, codes, absmax), (width, stride, float(threshold)), constants, WARPS)
    return codes, absmax


@triton.jit
def _dequantize(codes_ptr, absmax_ptr, out_ptr, width, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + row * width + col, mask=col < width, other=0).to(tl.float32)
    values = codes * tl.load(absmax_ptr + row) * INVERSE_127
    tl.store(out_ptr + row * width + col, values.to(out_ptr.dtype.element_ty), mask=col < width, cache_modifier=".cs")


_dequantize_launcher = Launcher(_dequantize)


@reference.dequantize_rows_int8.kernel("cuda", "xpu")
def dequantize_rows_int8(codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    rows, width = codes.shape
    out = torch.empty(rows, width, dtype=dtype, device=codes.device)
    if out.numel():
        block = min(BLOCK, power_of_2(width))
        _dequantize_launcher(
            rows * ceil_div(width, block), (codes.contiguous(), absmax.contiguous(), out), (width,), (block,), WARPS
        )
    return out


@triton.jit
def _scale(product_ptr, x_ptr, w_ptr, bias_ptr, out_ptr, width, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    product = tl.load(product_ptr + row * width + col, mask=mask, other=0).to(tl.float32)
    values = product * (tl.load(x_ptr + row) * tl.load(w_ptr + col, mask=mask, other=0.0)) * INVERSE_127_SQUARED
    if BIAS:
        values += tl.load(bias_ptr + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + col, values.to(out_ptr.dtype.element_ty), mask=mask)


_scale_launcher = Launcher(_scale, enable_fp_fusion=False)


@reference.scale_int8_product.kernel("cuda", "xpu")
def scale_int8_product(
    product: Tensor, x_absmax: Tensor, w_absmax: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    rows, width = product.shape
    out = torch.empty(rows, width, dtype=dtype, device=product.device)
    if out.numel():
        block = min(BLOCK, power_of_2(width))
        tensors = (product.contiguous(), x_absmax, w_absmax.contiguous(), w_absmax if bias is None else bias, out)
        _scale_launcher(rows * ceil_div(width, block), tensors, (width,), (bias is not None, block), WARPS)
    return out
