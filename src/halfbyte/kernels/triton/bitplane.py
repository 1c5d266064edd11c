"""Triton: k-bit weights in bit planes, one launch for each direction, and HQQ weights.

Dequantizing is bound by memory if there are few enough instructions. A value reads k/8 + 1/32 bytes and writes 2 in
bf16; while an H200 copies that many bytes, its SMs can execute some 20 instructions a value, 10 of them integer. So
codes are assembled eight at a time. A thread takes one byte of each of a block's k words and spreads its bits over the
nibbles of a word in three steps; shifted sums of four planes are eight codes. The eight values are one 16-byte store.
Neighbouring threads read the same words from the L1 cache. Compiled for sm_90 this takes 11.8, 13.2, 14.4 and 15.7
instructions a value at k = 2, 3, 4, 5; NF4's kernel takes 11.3.

The arithmetic follows the reference operation by operation, in fp32, with `enable_fp_fusion=False`.

HQQ weights are decoded without a table: codes are converted to floats, then scale · (code − zero). A value reads bits/8
+ 4/group bytes and, in bf16, writes 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.bitplane import BLOCK, dequantize_bitplane, quantize_bitplane
from ...formats.hqq import dequantize_hqq
from ..tiling import ceil_div
from .launch import Launcher

GROUPS = 512  # groups of eight values that a program decodes
BLOCKS = 32  # blocks that a program encodes


@triton.jit
def plane_byte(packed_ptr, block, byte, mask, PLANE: tl.constexpr, K: tl.constexpr):
    """Bits 8·part to 8·part + 7 of one plane, int32 in the shape of `block`."""
    return (tl.load(packed_ptr + block * K + PLANE, mask=mask, other=0) >> (byte * 8)) & 255


@triton.jit
def nibbles(packed_ptr, block, byte, mask, FIRST: tl.constexpr, K: tl.constexpr):
    """Planes FIRST to FIRST + 3 of eight codes, code i in nibble i; int32 in the shape of `block`."""
    word = tl.zeros_like(byte)
    for plane in tl.static_range(FIRST, min(FIRST + 4, K)):
        bits = plane_byte(packed_ptr, block, byte, mask, plane, K)
        bits = (bits | (bits << 12)) & 0x000F000F
        bits = (bits | (bits << 6)) & 0x03030303
        bits = (bits | (bits << 3)) & 0x11111111
        word += bits << (plane - FIRST)
    return word


@triton.jit
def eight_codes(packed_ptr, block, byte, mask, K: tl.constexpr, SHIFT: tl.constexpr):
    """Codes 8·part to 8·part + 7 of each block, shifted left by SHIFT; int32 [groups, 8], at most eight bits."""
    low = nibbles(packed_ptr, block, byte, mask, 0, K)
    even, odd = low & 0x0F0F0F0F, (low >> 4) & 0x0F0F0F0F  # one code per byte, which one instruction extracts
    if K > 4:
        high = nibbles(packed_ptr, block, byte, mask, 4, K)
        even |= (high & 0x0F0F0F0F) << 4
        odd |= ((high >> 4) & 0x0F0F0F0F) << 4
    even, odd = even << SHIFT, odd << SHIFT
    lane = tl.arange(0, 8)[None, :]
    return (tl.where(lane % 2 == 0, even[:, None], odd[:, None]) >> (lane // 2 * 8)) & 255


@triton.jit
def store_eight(out_ptr, values, group, mask, width, PADDED: tl.constexpr, MULTIPLE: tl.constexpr):
    """Store float [groups, 8] at 8·group; with PADDED rows, store only columns below their width."""
    lane = tl.arange(0, 8)[None, :]
    values = values.to(out_ptr.dtype.element_ty)
    if PADDED:
        per_row = (width + MULTIPLE - 1) // MULTIPLE * (MULTIPLE // 8)
        row, column = group // per_row, (group % per_row)[:, None] * 8 + lane
        inside = mask[:, None] & (column < width)
        tl.store(out_ptr + row[:, None] * width + column, values, mask=inside)
    else:
        first = (group * 8)[:, None]
        tl.store(out_ptr + first + lane, values, mask=mask[:, None], cache_modifier=".cs")


@triton.jit
def e4m4(codes):
    """Decode E4M4 bytes to fp32: the bits of fp32 with another bias; codes below 16 are subnormal."""
    wide = codes.to(tl.int32)
    normal = ((wide + 1856) << 19).to(tl.float32, bitcast=True)
    return tl.where(wide < 16, wide.to(tl.float32) * 0.00006103515625, normal)


@triton.jit
def _dequantize(
    packed_ptr, scale_ptr, zero_ptr, factor_ptr, codebook_ptr, out_ptr, groups, width, run,
    K: tl.constexpr, AFFINE: tl.constexpr, PADDED: tl.constexpr, RUNS: tl.constexpr, FITTED: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = group < groups
    block, byte = group // 4, (group % 4).to(tl.int32)
    # An unsigned byte offset becomes an address with one integer instruction a value less than an index.
    offset = eight_codes(packed_ptr, block, byte, mask, K, 2).to(tl.uint32)
    if FITTED:  # a codebook for each of several stacked matrices
        offset += (tl.where(mask, block // run, 0).to(tl.uint32) << (K + 2))[:, None]
    table = codebook_ptr.to(tl.pointer_type(tl.uint8)) + offset
    values = tl.load(table.to(tl.pointer_type(tl.float32)))
    if AFFINE:
        values -= tl.load(zero_ptr + block, mask=mask, other=0).to(tl.float32)[:, None]
    scale = e4m4(tl.load(scale_ptr + block, mask=mask, other=0)) * (
        tl.load(factor_ptr + tl.where(mask, block // run, 0)) if RUNS else tl.load(factor_ptr)
    )
    store_eight(out_ptr, values * scale[:, None], group, mask, width, PADDED, 32)


_dequantize_launcher = Launcher(_dequantize, enable_fp_fusion=False)


@dequantize_bitplane.kernel("cuda", "xpu", rank=2)
def dequantize(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor,
    codebook: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(rows, width, dtype=dtype, device=packed.device)
    groups = scales.numel() * (BLOCK // 8)
    if groups:
        k, matrices = codebook.shape[-1].bit_length() - 1, max(factor.numel(), 1)
        _dequantize_launcher(
            ceil_div(groups, GROUPS),
            (packed, scales, scales if zeros is None else zeros, factor, codebook, out),
            (groups, width, scales.numel() // matrices),
            (k, zeros is not None, width % BLOCK != 0, matrices > 1, codebook.dim() > 1 and matrices > 1, GROUPS),
            warps=4,
        )
    return out


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


@triton.jit
def _dequantize_hqq(
    packed_ptr, scale_ptr, zero_ptr, out_ptr, groups, width,
    BITS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask = group < groups
    codes = eight_codes(packed_ptr, group // 4, (group % 4).to(tl.int32), mask, BITS, 0)
    pair = group // (GROUP // 8)
    scale = tl.load(scale_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + pair, mask=mask, other=0.0).to(tl.float32)
    values = (codes.to(tl.float32) - zero[:, None]) * scale[:, None]
    store_eight(out_ptr, values, group, mask, width, PADDED, GROUP)


_hqq_launcher = Launcher(_dequantize_hqq, enable_fp_fusion=False)


@dequantize_hqq.kernel("cuda", "xpu")
def dequantize_groups(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(rows, width, dtype=dtype, device=packed.device)
    eights = scales.numel() * (group // 8)
    if eights:
        _hqq_launcher(
            ceil_div(eights, GROUPS),
            (packed, scales, zeros, out),
            (eights, width),
            (bits, group, width % group != 0, GROUPS),
            warps=4,
        )
    return out
