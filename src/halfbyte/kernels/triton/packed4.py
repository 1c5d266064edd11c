"""Triton: dequantization of NVFP4 and MXFP4, and of int4 words, in one launch.

Bound by memory: n values read n/2 bytes of codes, and scales, and write 2n bytes in bf16.

NVFP4 and MXFP4: as in `triton/blockwise4.py` a thread decodes one 4-byte word into one 16-byte store. Scale bytes are
decoded with integer arithmetic, which needs no FP8 support of the GPU. Both products round as in the reference.

int4: words run along the outputs, [K, N], and the result is [N, K]. A program decodes a square tile, which the
compiler transposes through shared memory before the store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.e2m1 import codebook_e2m1, dequantize_e2m1
from ...formats.int4 import PACK, dequantize_int4
from ..tiling import ceil_div
from .launch import Launcher

WORDS = 512  # 4-byte words of NVFP4 and MXFP4 that a program decodes
INPUTS, OUTPUTS = 64, 64  # values of a program's tile of int4


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


@triton.jit
def _dequantize_int4(
    qweight_ptr, qzeros_ptr, scales_ptr, index_ptr, rows_ptr, out_ptr, inputs, outputs, group_size, zero_shift,
    INDEXED: tl.constexpr, ORDERED: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(outputs, OUTPUTS)
    k = (tl.program_id(0) // tiles).to(tl.int64) * INPUTS + tl.arange(0, INPUTS)
    n = (tl.program_id(0) % tiles).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (k < inputs)[:, None] & (n < outputs)[None, :]
    if ORDERED:
        row = tl.load(rows_ptr + k, mask=k < inputs, other=0).to(tl.int64)
    else:
        row = k
    word = (row // 8)[:, None] * outputs + n[None, :]
    codes = tl.load(qweight_ptr + word, mask=inside, other=0) >> ((row % 8).to(tl.int32) * 4)[:, None]
    if INDEXED:
        group = tl.load(index_ptr + row, mask=k < inputs, other=0).to(tl.int64)
    else:
        group = row // group_size
    packed_zeros = tl.load(qzeros_ptr + group[:, None] * (outputs // 8) + (n // 8)[None, :], mask=inside, other=0)
    zeros = ((packed_zeros >> ((n % 8).to(tl.int32) * 4)[None, :]) + zero_shift) & 15
    scales = tl.load(scales_ptr + group[:, None] * outputs + n[None, :], mask=inside, other=0.0).to(tl.float32)
    values = ((codes & 15) - zeros).to(tl.float32) * scales
    tl.store(out_ptr + n[None, :] * inputs + k[:, None], values.to(out_ptr.dtype.element_ty), mask=inside)


_int4_launcher = Launcher(_dequantize_int4)


@dequantize_int4.kernel("cuda", "xpu")
def dequantize_words(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    order: Tensor | None,
    zero_shift: int,
    dtype: torch.dtype,
) -> Tensor:
    groups, outputs = scales.shape
    inputs = qweight.shape[0] * PACK
    out = torch.empty(outputs, inputs, dtype=dtype, device=qweight.device)
    _int4_launcher(
        ceil_div(inputs, INPUTS) * ceil_div(outputs, OUTPUTS),
        (
            qweight.contiguous(),
            qzeros.contiguous(),
            scales.contiguous(),
            qzeros if group_index is None else group_index.contiguous(),
            qzeros if order is None else order[1].contiguous(),
            out,
        ),
        (inputs, outputs, inputs // groups, zero_shift),
        (group_index is not None, order is not None, INPUTS, OUTPUTS),
        warps=4,
    )
    return out
