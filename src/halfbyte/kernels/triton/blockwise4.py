"""Triton: 4-bit weights and their values, one launch each, nested scales included.

Both are bound by memory. Dequantizing n values reads n/2 bytes of codes and a scale per block, and writes 2n bytes in
bf16: the floor is (2.5 n + scales) / bandwidth. A thread decodes a 4-byte word: its 8 values are one 16-byte store, so
no value changes threads, and the 64-byte codebook is one line of the first-level cache. Measured on an H200, where a
copy moves 4.2 TB/s: 4.0 TB/s at 28672×8192 with nested scales, against 3.2 for a kernel that decodes 16 bytes a thread
and 2.6 for one that selects values arithmetically (docs/log.md).

The arithmetic is the reference's, operation by operation, in fp32. `enable_fp_fusion=False` keeps the compiler from
contracting a nested scale's multiply and add into one rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.blockwise4 import NESTED_BLOCK, dequantize_blockwise4, quantize_blockwise4
from ...ops.codebooks import codebook4, thresholds4
from ..tiling import ceil_div
from .launch import Launcher

WORDS = 512  # 4-byte words a program decodes
VALUES = 4096  # values a program encodes


@triton.jit
def _dequantize(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, out_ptr, numel,
    WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word * 8 < numel
    codes = tl.load(packed_ptr + word, mask=mask, other=0)
    block = word // WORDS_PER_BLOCK
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        second = tl.load(second_ptr + block // NESTED_BLOCK, mask=mask, other=0.0)
        scale = tl.load(code_ptr + q) * second + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    lane = tl.arange(0, 8)
    # Bytes are in memory order, the high nibble of each first: nibbles 1, 0, 3, 2, 5, 4, 7, 6 of the word.
    nibble = (codes[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15
    values = (tl.load(codebook_ptr + nibble) * scale[:, None]).to(out_ptr.dtype.element_ty)
    element = word[:, None] * 8 + lane[None, :]
    tl.store(out_ptr + element, values, mask=element < numel, cache_modifier=".cs")


_dequantize_launcher = Launcher(_dequantize, enable_fp_fusion=False)


@dequantize_blockwise4.kernel("cuda", "xpu")
def dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=packed.device)
    if not numel:
        return out
    if packed.numel() % 4:  # a tensor whose size is no multiple of 8: small ones in practice
        packed = torch.nn.functional.pad(packed.view(-1), (0, -packed.numel() % 4))
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    _dequantize_launcher(
        ceil_div(numel, 8 * WORDS),
        (packed.view(-1).view(torch.int32), absmax, second, code, offset, codebook4(quant_type, packed.device), out),
        (numel,),
        (WORDS, blocksize // 8, nested is not None, NESTED_BLOCK),
        warps=4,
    )
    return out


@triton.jit
def _quantize(
    weight_ptr, packed_ptr, absmax_ptr, midpoint_ptr, rank_ptr, numel, blocks,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(weight_ptr + element, mask=element < numel, other=0.0).to(tl.float32)
    # NaN must reach absmax, where the caller looks for it: fmax would drop it.
    absmax = tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=1)
    floor = tl.maximum(absmax, tl.full((BLOCKS,), 1e-38, tl.float32))
    partial = (block + 1) * SIZE > numel
    stored = tl.where(partial, floor, absmax)
    tl.store(absmax_ptr + block, stored, mask=block < blocks)
    # As the reference: a whole block multiplies by the reciprocal, a partial one divides.
    whole = values * tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), floor)[:, None]
    scaled = tl.where(partial[:, None], tl.div_rn(values, floor[:, None] + tl.zeros_like(values)), whole)
    scaled = tl.minimum(tl.maximum(scaled, -1.0), 1.0)
    rank = tl.zeros((BLOCKS, SIZE), dtype=tl.int32)
    for i in tl.static_range(15):
        rank += (scaled > tl.load(midpoint_ptr + i)).to(tl.int32)
    codes = tl.load(rank_ptr + rank).to(tl.int32)
    high, low = tl.split(tl.reshape(codes, (BLOCKS, SIZE // 2, 2)))
    byte = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(packed_ptr + byte, ((high << 4) | low).to(tl.uint8), mask=2 * byte < numel)


_quantize_launcher = Launcher(_quantize, enable_fp_fusion=False)


@quantize_blockwise4.kernel("cuda", "xpu")
def quantize(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    numel = weight.numel()
    absmax = torch.empty(ceil_div(numel, blocksize), dtype=torch.float32, device=weight.device)
    packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8, device=weight.device)
    midpoints, code_of_rank = thresholds4(quant_type, weight.device)
    blocks = max(VALUES // blocksize, 1)
    if numel:
        _quantize_launcher(
            ceil_div(absmax.numel(), blocks),
            (weight, packed, absmax, midpoints, code_of_rank),
            (numel, absmax.numel()),
            (blocks, blocksize),
            warps=4,
        )
    return packed, absmax
