"""Triton: dequantization of NVFP4 and MXFP4 in one launch.

Bound by memory: n values read n/2 bytes of codes and a scale byte per block, and write 2n bytes in bf16. As in
`triton/blockwise4.py` a thread decodes one 4-byte word into one 16-byte store. Scale bytes are decoded with integer
arithmetic, which needs no FP8 support of the GPU. Both products round as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.e2m1 import codebook_e2m1, dequantize_e2m1
from ..tiling import ceil_div
from .launch import Launcher

WORDS = 512  # 4-byte words that a program decodes


@triton.jit
def _dequantize(
    packed_ptr, scale_ptr, factor_ptr, codebook_ptr, out_ptr, words, width, run,
    ROW_WORDS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WORDS: tl.constexpr, E8M0: tl.constexpr,
    PADDED: tl.constexpr, RUNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    inside = word < words
    codes = tl.load(packed_ptr + word, mask=inside, other=0)
    row, column = word // ROW_WORDS, word % ROW_WORDS
    block = (row // TILE_ROWS) * (ROW_WORDS // TILE_WORDS) + column // TILE_WORDS
    byte = tl.load(scale_ptr + block, mask=inside, other=0).to(tl.int32)
    if E8M0:  # the byte is the exponent field; 0 is 2^-127, half of the smallest normal
        scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    else:  # three mantissa bits below the exponent, with bias 7 instead of 127; codes below 8 are multiples of 2^-9
        normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        scale = tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)
        scale *= tl.load(factor_ptr + tl.where(inside, row // run, 0)) if RUNS else tl.load(factor_ptr)
    lane = tl.arange(0, 8)
    nibble = (codes[:, None] >> (lane * 4)[None, :]) & 15
    values = (tl.load(codebook_ptr + nibble) * scale[:, None]).to(out_ptr.dtype.element_ty)
    if PADDED:
        at = column[:, None] * 8 + lane[None, :]
        tl.store(out_ptr + row[:, None] * width + at, values, mask=inside[:, None] & (at < width))
    else:
        element = word[:, None] * 8 + lane[None, :]
        tl.store(out_ptr + element, values, mask=inside[:, None], cache_modifier=".cs")


_dequantize_launcher = Launcher(_dequantize, enable_fp_fusion=False)


@dequantize_e2m1.kernel("cuda", "xpu")
def dequantize(
    packed: Tensor,
    scales: Tensor,
    factor: Tensor | None,
    tile: tuple[int, int],
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(packed.shape[0], width, dtype=dtype, device=packed.device)
    codes = packed.contiguous().view(torch.int32)
    codebook = codebook_e2m1(packed.device)
    if out.numel():
        matrices = 1 if factor is None else max(factor.numel(), 1)
        _dequantize_launcher(
            ceil_div(codes.numel(), WORDS),
            (codes, scales.contiguous(), codebook if factor is None else factor, codebook, out),
            (codes.numel(), width, codes.shape[0] // matrices),
            (codes.shape[1], tile[0], tile[1] // 8, factor is None, 8 * codes.shape[1] != width, matrices > 1, WORDS),
            warps=4,
        )
    return out
