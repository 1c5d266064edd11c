"""Triton: dequantization of NVFP4 and MXFP4 in one launch.

Bound by memory: n values read n/2 bytes of codes, and scales, and write 2n bytes in bf16.

NVFP4 and MXFP4: as in `triton/blockwise4.py` a thread decodes one 4-byte word into one 16-byte store. Scale bytes are
decoded with integer arithmetic, which needs no FP8 support of the GPU. Both products round as in the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.e2m1 import codebook_e2m1, dequantize_e2m1
from ..tiling import ceil_div
from .decoders import e4m3_scale, e8m0_scale
from .launch import Launcher

WORDS = 512  # 4-byte words of NVFP4 and MXFP4 that a program decodes


@triton.jit
def _dequantize_e2m1(
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
    if E8M0:
        scale = e8m0_scale(byte)
    else:
        scale = e4m3_scale(byte)
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


_e2m1_launcher = Launcher(_dequantize_e2m1, enable_fp_fusion=False)


@dequantize_e2m1.kernel("cuda", "xpu")
def dequantize_blocks(
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
        _e2m1_launcher(
            ceil_div(codes.numel(), WORDS),
            (codes, scales.contiguous(), codebook if factor is None else factor, codebook, out),
            (codes.numel(), width, codes.shape[0] // matrices),
            (codes.shape[1], tile[0], tile[1] // 8, factor is None, 8 * codes.shape[1] != width, matrices > 1, WORDS),
            warps=4,
        )
    return out
