"""Triton twins of `halfbyte.ops.float8`.

Dequantizing a value moves 3 bytes in bf16. E4M3 is decoded with integers, which GPUs without FP8 can do too: its bits,
shifted into fp16's exponent and mantissa, are the value times 2^-8, subnormals included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.float8 import TILE, Scaling, dequantize_float8
from .launch import Launcher, ceil_div, power_of_2

BLOCK = 4096  # values of a row that a program takes
WARPS = 8


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


@dequantize_float8.twin("cuda", "xpu")
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
