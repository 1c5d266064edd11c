"""Triton: a 4-bit weight as E4M3, 1.5 bytes moved a weight, in either orientation.

Both kernels decode 4-byte words of eight codes, as `triton.blockwise4` does. The transposing one takes a tile, whose
rows of codes are a cache line each way: 64 bytes of packed codes, and 128 bytes of E4M3 after the turn.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.blockwise4 import NESTED_BLOCK
from ...ops.blockwise4_float8 import float8_of_blockwise4
from ...ops.codebooks import codebook4
from ...ops.float8 import E4M3, FP8_MAX
from ..tiling import ceil_div
from .float8 import float8_obstacle, to_float8
from .launch import Launcher

WORDS = 512  # 4-byte words a program decodes
TILE_ROWS, TILE_WORDS = 128, 16  # of the tile that a program turns: 128×128 weights
LIMIT = FP8_MAX[E4M3]


@triton.jit
def _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, block, mask, NESTED: tl.constexpr, SIZE: tl.constexpr):
    """fp32 scale of each block."""
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        second = tl.load(second_ptr + block // SIZE, mask=mask, other=0.0)
        scale = tl.load(code_ptr + q) * second + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    return scale


@triton.jit
def _straight(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, factor_ptr, out_ptr, words, width,
    out_stride, WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr, SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < words
    codes = tl.load(packed_ptr + word, mask=mask, other=0)
    block = word // WORDS_PER_BLOCK
    scale = _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, block, mask, NESTED, SIZE)
    lane = tl.arange(0, 8)
    # Bytes are in memory order, the high nibble of each first: nibbles 1, 0, 3, 2, 5, 4, 7, 6 of the word.
    nibble = (codes[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15
    values = to_float8(tl.load(codebook_ptr + nibble) * scale[:, None], tl.load(factor_ptr), LIMIT)
    place = word // (width // 8) * out_stride + word % (width // 8) * 8
    tl.store(out_ptr + place[:, None] + lane[None, :], values.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _turned(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, factor_ptr, out_ptr, rows, width,
    out_stride, ROWS: tl.constexpr, WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr,
    SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, 8 * WORDS)
    row = ((tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = (tl.program_id(0) % across) * WORDS
    col_word = first + tl.arange(0, WORDS)
    mask = (row < rows)[:, None] & (col_word * 8 < width)[None, :]
    word = row[:, None] * (width // 8) + col_word[None, :]
    codes = tl.load(packed_ptr + word, mask=mask, other=0)
    scale = _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, word // WORDS_PER_BLOCK, mask, NESTED, SIZE)
    lane = tl.arange(0, 8)
    nibble = (codes[:, :, None] >> ((lane ^ 1) * 4)[None, None, :]) & 15
    values = to_float8(tl.load(codebook_ptr + nibble) * scale[:, :, None], tl.load(factor_ptr), LIMIT)
    tile = tl.trans(tl.reshape(values.to(out_ptr.dtype.element_ty), (ROWS, 8 * WORDS)))
    col = (first * 8 + tl.arange(0, 8 * WORDS)).to(tl.int64)
    inside = (col < width)[:, None] & (row < rows)[None, :]
    tl.store(out_ptr + col[:, None] * out_stride + row[None, :], tile, mask=inside)


_straight_launcher = Launcher(_straight, enable_fp_fusion=False)
_turned_launcher = Launcher(_turned, enable_fp_fusion=False)


@float8_of_blockwise4.kernel("cuda", "xpu", unless=float8_obstacle, rank=2)
def float8(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    shape: tuple[int, int],
    factor: Tensor,
    transposed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    rows, width = shape
    if out is None:
        out = torch.empty((width, rows) if transposed else shape, dtype=E4M3, device=packed.device)
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    codebook = codebook4(quant_type, packed.device)
    tensors = (packed.view(-1).view(torch.int32), absmax, second, code, offset, codebook, factor, out)
    decoding = (blocksize // 8, nested is not None, NESTED_BLOCK, LIMIT)
    if transposed:
        programs = ceil_div(rows, TILE_ROWS) * ceil_div(width, 8 * TILE_WORDS)
        constants = (TILE_ROWS, TILE_WORDS, *decoding)
        _turned_launcher(programs, tensors, (rows, width, out.stride(0)), constants, warps=8)
    else:
        words = rows * width // 8
        _straight_launcher(ceil_div(words, WORDS), tensors, (words, width, out.stride(0)), (WORDS, *decoding), warps=4)
    return out
