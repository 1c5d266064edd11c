"""Triton: quantization to k-bit codes in bit planes, in one launch.

The arithmetic follows the reference operation by operation, in fp32, with `enable_fp_fusion=False`. The inverse is in
`dequantize`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.bitplane import quantize_bitplane
from ..tiling import ceil_div
from .decoders import e4m4
from .launch import Launcher

BLOCKS = 32  # blocks that a program encodes


@triton.jit
def _quantize(
    blocks_ptr, scale_ptr, zero_ptr, factor_ptr, codebook_ptr, packed_ptr, blocks,
    K: tl.constexpr, AFFINE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    mask = block < blocks
    lane = tl.arange(0, 32)[None, :]
    values = tl.load(blocks_ptr + block[:, None] * 32 + lane, mask=mask[:, None], other=0.0).to(tl.float32)
    step = e4m4(tl.load(scale_ptr + block, mask=mask, other=0)) * tl.load(factor_ptr)
    step = tl.maximum(step, tl.full((BLOCKS,), 1.1754943508222875e-38, tl.float32))
    scaled = tl.div_rn(values, step[:, None] + tl.zeros_like(values))
    if AFFINE:
        scaled += tl.load(zero_ptr + block, mask=mask, other=0).to(tl.float32)[:, None]
    code = tl.zeros((BLOCKS, 32), dtype=tl.int32)
    for i in tl.static_range((1 << K) - 1):
        middle = (tl.load(codebook_ptr + i) + tl.load(codebook_ptr + i + 1)) * 0.5
        code += (scaled > middle).to(tl.int32)
    for plane in tl.static_range(K):
        word = tl.sum(((code >> plane) & 1) << lane, axis=1)
        tl.store(packed_ptr + block * K + plane, word, mask=mask)


_quantize_launcher = Launcher(_quantize, enable_fp_fusion=False)


@quantize_bitplane.kernel("cuda", "xpu")
def quantize(blocks: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor) -> Tensor:
    k = codebook.numel().bit_length() - 1
    packed = torch.empty(scales.numel() * k, dtype=torch.int32, device=blocks.device)
    if scales.numel():
        _quantize_launcher(
            ceil_div(scales.numel(), BLOCKS),
            (blocks.contiguous(), scales, scales if zeros is None else zeros, factor, codebook, packed),
            (scales.numel(),),
            (k, zeros is not None, BLOCKS),
            warps=4,
        )
    return packed
