"""Triton: 4-bit quantization with the bytes of bitsandbytes' CUDA kernels, and the reciprocal that they use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.blockwise_cuda import SMALLEST, approximate_reciprocal, quantize_blockwise4_cuda, thresholds
from ..device import device_of
from ..tiling import ceil_div
from .launch import Launcher

VALUES = 4096  # values that a program encodes
BLOCK = 1024  # reciprocals of a program
TINY = tl.constexpr(SMALLEST)


@triton.jit
def _reciprocal(x, NVIDIA: tl.constexpr):
    if NVIDIA:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return inverse


@triton.jit
def _reciprocals(x_ptr, out_ptr, n, NVIDIA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    tl.store(out_ptr + at, _reciprocal(x, NVIDIA), mask=at < n)


@triton.jit
def _quantize(
    weight_ptr, packed_ptr, absmax_ptr, threshold_ptr, code_ptr, numel, blocks,
    FP4: tl.constexpr, NVIDIA: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(weight_ptr + element, mask=element < numel, other=0.0).to(tl.float32)
    smallest = tl.full((BLOCKS, SIZE), TINY, tl.float32)
    values = tl.where(tl.abs(values) < smallest, 0.0, values)
    # NaN must reach absmax, which the caller checks: fmax would drop it.
    absmax = tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=1)
    tl.store(absmax_ptr + block, absmax, mask=block < blocks)
    ratio = values * _reciprocal(absmax, NVIDIA)[:, None]  # NaN in a block of zeros: it exceeds no threshold
    compared = tl.abs(ratio) if FP4 else ratio
    rank = tl.zeros((BLOCKS, SIZE), dtype=tl.int32)
    for i in tl.static_range(7 if FP4 else 15):
        rank += (compared > tl.load(threshold_ptr + i)).to(tl.int32)
    codes = tl.load(code_ptr + rank).to(tl.int32)
    if FP4:
        codes += (ratio <= -smallest).to(tl.int32) * 8
    high, low = tl.split(tl.reshape(codes, (BLOCKS, SIZE // 2, 2)))
    byte = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(packed_ptr + byte, ((high << 4) | low).to(tl.uint8), mask=2 * byte < numel)


_reciprocals_launcher = Launcher(_reciprocals, enable_fp_fusion=False)
_quantize_launcher = Launcher(_quantize, enable_fp_fusion=False)


@approximate_reciprocal.kernel("cuda")
def reciprocal(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    if len(x):
        _reciprocals_launcher(ceil_div(len(x), BLOCK), (x, out), (len(x),), (device_of(x).backend == "cuda", BLOCK), 4)
    return out


@quantize_blockwise4_cuda.kernel("cuda")
def quantize(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    numel = weight.numel()
    absmax = torch.empty(ceil_div(numel, blocksize), dtype=torch.float32, device=weight.device)
    packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8, device=weight.device)
    blocks = max(VALUES // blocksize, 1)
    if numel:
        _quantize_launcher(
            ceil_div(absmax.numel(), blocks),
            (weight, packed, absmax, *thresholds(quant_type, weight.device)),
            (numel, absmax.numel()),
            (quant_type == "fp4", device_of(weight).backend == "cuda", blocks, blocksize),
            warps=4,
        )
    return packed, absmax
