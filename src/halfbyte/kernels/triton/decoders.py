"""Triton: one decoder per storage format, which the products take as a constexpr (`few_rows`, `grouped`).

A decoder reads the codes and scales of some rows of a matrix and of WORDS · 8 of its columns, and returns

    v₀, …, v₇   fp32 [rows, WORDS], the values of each word's eight columns, divided by their scale
    s           fp32 [rows, WORDS], the scale

so that a dot product multiplies by the scale once per word. All eight columns of a word share one scale; where a format
orders its columns otherwise (GPTQ with act-order), the values are scaled and s is 1. Column i of word w is 8w + i. In
bit planes, it is 32·(w div 4) + 4i + (w mod 4): the bits of one plane's word that belong to eight codes are then four
bits apart, and one mask takes them all.

Values of a code are looked up in a table. On NVIDIA's GPUs the table is in the lanes of a warp, and a look-up is one
shift and one shuffle; its index is taken modulo 32, so a table that is stored repeatedly needs no mask. Elsewhere
(ROCm, the interpreter) a look-up is a load from the L1 cache. Integers become floats as the mantissa of 2²³, since GPUs
convert at a quarter of the rate of additions. FP8 codes become fp32 by shifts, so they need no conversion unit.

To add a format, write its decoder and the function that makes its `Packed`, and add it to `packed_stack`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats import HQQ, Aqlm, Blockwise4, Float8, Format, Int8, KBit, Mxfp4, Nvfp4, Stack
from ...formats import int8 as int8_format
from ...formats.bitplane import BLOCK as PLANE_BLOCK
from ...formats.blockwise4 import NESTED_BLOCK
from ...formats.codebooks import codebook4
from ...formats.e2m1 import codebook_e2m1
from ...formats.float8 import TILE, Scaling
from ...formats.int4 import Int4
from ...formats.mxfp4 import BLOCK as MX_BLOCK
from ...ops.experts import StackedWeight
from ..device import device_of
from ..tiling import ceil_div

MOST_WORDS = 2**31  # 4-byte words, and scales, of a weight: their indices are int32
WHOLE_ROW = 1 << 30  # as the columns of a scale: a row has one
INVERSE_127 = tl.constexpr(int8_format.INVERSE_127)


class Options(NamedTuple):
    """Constants of a decoder. A format sets those that its decoder reads.

    Args:
        group: columns that share a scale.
        tile_rows: rows that share a scale.
        bits: of a code in planes.
        levels: entries of the table of values, a power of two; 0 without a table.
        tables: whether each matrix has a table of its own.
        factors: whether each matrix has a factor of its scales.
        strided: whether the columns of a word are four apart, as in bit planes.
        zeros: whether values are codes minus the zero of their group.
        indexed, ordered: whether `g_idx` or `order` of int4 is stored.
        zero_shift: as in `dequantize_int4`.
        nested: number of scales per second-level scale; 0 if scales are not nested.
        scales: "float", or the 8-bit type of the stored scales: "e4m3", "e8m0".
        shuffle: whether look-ups are warp shuffles.
    """

    group: int = WHOLE_ROW
    tile_rows: int = 1
    bits: int = 4
    levels: int = 0
    tables: bool = False
    factors: bool = False
    strided: bool = False
    zeros: bool = False
    indexed: bool = False
    ordered: bool = False
    zero_shift: int = 0
    nested: int = 0
    scales: str = "float"
    shuffle: bool = False

    @property
    def by_column(self) -> bool:
        """Whether each column of a word reads its scale (int4). Such loads would fill shared memory in a pipeline."""
        return self.indexed or self.ordered or self.group % 8 != 0


# --- shared by decoders ----------------------------------------------------------------------------------------------


@triton.jit
def opened(pointers, expert, OPTIONS: tl.constexpr):
    """Pointers of a weight, then what a program loads once: its lane's entry of the table, and the matrix's factor."""
    codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr = pointers
    factor = 1.0
    if OPTIONS.factors:
        factor = tl.load(factor_ptr + expert)
    lanes = 0.0
    if OPTIONS.tables:
        table_ptr += expert * OPTIONS.levels
    if OPTIONS.levels > 0 and OPTIONS.shuffle:  # a scalar in Triton, with a different value in each lane
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        lanes = tl.load(table_ptr + (lane & (OPTIONS.levels - 1)))
    return codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, lanes, factor


@triton.jit
def column_of(word, i, OPTIONS: tl.constexpr):
    """Column i of a word."""
    if OPTIONS.strided:
        column = (word // 4) * 32 + i * 4 + word % 4
    else:
        column = word * 8 + i
    return column


@triton.jit
def values(
    weight, expert, row, rows, start, words, like_ptr, WORDS: tl.constexpr, DECODER: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Values [rows, 8·WORDS] of a matrix from column `start` on, scaled and rounded to the dtype of `like_ptr`."""
    v, scale = DECODER(weight, expert, row, rows, start // 8, words, WORDS, OPTIONS)
    even = tl.join(tl.join(v[0] * scale, v[4] * scale), tl.join(v[2] * scale, v[6] * scale))
    odd = tl.join(tl.join(v[1] * scale, v[5] * scale), tl.join(v[3] * scale, v[7] * scale))
    joined = tl.join(even, odd).to(like_ptr.dtype.element_ty)
    if OPTIONS.strided:
        joined = tl.permute(tl.reshape(joined, (row.shape[0], WORDS // 4, 4, 8)), (0, 1, 3, 2))
    return tl.reshape(joined, (row.shape[0], 8 * WORDS))


@triton.jit
def _groups(start, WORDS: tl.constexpr, GROUP: tl.constexpr):
    """Groups of the columns of WORDS words: one for several words, or with a GROUP that is no power of two one each."""
    if GROUP & (GROUP - 1) == 0:
        group = start * 8 // GROUP + tl.arange(0, max(WORDS * 8 // GROUP, 1))
    else:
        group = (start + tl.arange(0, WORDS)) * 8 // GROUP
    return group


@triton.jit
def _blocks(expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    """Indices int32 [rows, groups] of the scales of some rows, and which of them there are."""
    group = _groups(start, WORDS, OPTIONS.group)
    per_row = tl.cdiv(words * 8, OPTIONS.group)
    tile_row = expert * tl.cdiv(rows, OPTIONS.tile_rows) + row // OPTIONS.tile_rows
    return tile_row[:, None] * per_row + group[None, :], (row < rows)[:, None] & (group < per_row)[None, :]


@triton.jit
def _spread(x, WORDS: tl.constexpr):
    """Repeat each column of x [rows, groups] for its words, [rows, WORDS]."""
    rows: tl.constexpr = x.shape[0]
    groups: tl.constexpr = x.shape[1]
    if groups != WORDS:
        x = tl.reshape(tl.broadcast_to(x[:, :, None], (rows, groups, WORDS // groups)), (rows, WORDS))
    return x


@triton.jit
def _words(codes_ptr, expert, row, rows, start, words, WORDS: tl.constexpr):
    """Load WORDS words of each row, [rows, WORDS]; a row has `words`."""
    word = start + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    return tl.load(codes_ptr + (expert * rows + row)[:, None] * words + word[None, :], mask=inside, other=0)


@triton.jit
def _nibbles(word):
    """Shift each of a word's eight nibbles to the lowest bits, the low one first; higher bits are not cleared."""
    return word, word >> 4, word >> 8, word >> 12, word >> 16, word >> 20, word >> 24, word >> 28


@triton.jit
def _look_up(codes, lanes, table_ptr, OPTIONS: tl.constexpr):
    """Value of each code in the table; bits above those of a code are ignored."""
    if OPTIONS.shuffle:
        value = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [lanes, codes], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        value = tl.load(table_ptr + (codes & (OPTIONS.levels - 1)))
    return value


@triton.jit
def _look_up_all(codes, lanes, table_ptr, OPTIONS: tl.constexpr):
    """Values of eight codes. Shuffles of one word are one block, which keeps few values in registers at a time."""
    if OPTIONS.shuffle and OPTIONS.bits <= 4:
        v = tl.inline_asm_elementwise(
            """{
            .reg .b32 n;
            shfl.sync.idx.b32 $0, $9, $8, 0x1f, 0xffffffff;
            shr.u32 n, $8, 4;
            shfl.sync.idx.b32 $1, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 8;
            shfl.sync.idx.b32 $2, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 12;
            shfl.sync.idx.b32 $3, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 16;
            shfl.sync.idx.b32 $4, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 20;
            shfl.sync.idx.b32 $5, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 24;
            shfl.sync.idx.b32 $6, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 28;
            shfl.sync.idx.b32 $7, $9, n, 0x1f, 0xffffffff;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,f",
            [codes[0], lanes],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        v = (
            _look_up(codes[0], lanes, table_ptr, OPTIONS), _look_up(codes[1], lanes, table_ptr, OPTIONS),
            _look_up(codes[2], lanes, table_ptr, OPTIONS), _look_up(codes[3], lanes, table_ptr, OPTIONS),
            _look_up(codes[4], lanes, table_ptr, OPTIONS), _look_up(codes[5], lanes, table_ptr, OPTIONS),
            _look_up(codes[6], lanes, table_ptr, OPTIONS), _look_up(codes[7], lanes, table_ptr, OPTIONS),
        )  # fmt: skip
    return v


@triton.jit
def _difference(code, MASK: tl.constexpr, zero):
    """(code & MASK) − zero in fp32, rounded once."""
    return ((code & MASK) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0 - zero


@triton.jit
def _differences(codes, MASK: tl.constexpr, zero):
    return (
        _difference(codes[0], MASK, zero), _difference(codes[1], MASK, zero), _difference(codes[2], MASK, zero),
        _difference(codes[3], MASK, zero), _difference(codes[4], MASK, zero), _difference(codes[5], MASK, zero),
        _difference(codes[6], MASK, zero), _difference(codes[7], MASK, zero),
    )  # fmt: skip


@triton.jit
def e4m3_scale(byte):
    """Decode E4M3 bytes (int32, not negative) to fp32 without conversion units; codes below 8 are multiples of 2^-9."""
    normal = ((byte << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e8m0_scale(byte):
    """Decode E8M0 bytes (int32) to fp32: the exponent field; 0 is 2^-127, half of the smallest normal number."""
    return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m4(codes):
    """Decode E4M4 bytes to fp32: the bits of fp32 with another bias; codes below 16 are subnormal."""
    wide = codes.to(tl.int32)
    normal = ((wide + 1856) << 19).to(tl.float32, bitcast=True)
    return tl.where(wide < 16, wide.to(tl.float32) * 0.00006103515625, normal)


# --- NF4 and FP4 -----------------------------------------------------------------------------------------------------


@triton.jit
def blockwise4(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    """The high nibble of each byte comes first."""
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, table_ptr, lanes, _ = weight
    codes = _nibbles(_words(packed_ptr, expert, row, rows, start, words, WORDS))
    v = _look_up_all(codes, lanes, table_ptr, OPTIONS)
    block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
    if OPTIONS.nested:
        q = tl.load(absmax_ptr + block, mask=inside, other=0).to(tl.int32)
        second = tl.load(second_ptr + block // OPTIONS.nested, mask=inside, other=0.0)
        scale = tl.load(code_ptr + q) * second + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=inside, other=0.0)
    return (v[1], v[0], v[3], v[2], v[5], v[4], v[7], v[6]), _spread(scale, WORDS)


def packed_blockwise4(
    packed: Tensor, absmax: Tensor, nested: tuple[Tensor, Tensor, Tensor] | None, blocksize: int, quant_type: str,
    columns: int,
) -> Packed:  # fmt: skip
    table = codebook4(quant_type, packed.device)
    words = packed.view(-1).view(torch.int32)
    options = Options(group=blocksize, levels=16, nested=0 if nested is None else NESTED_BLOCK)
    return Packed(blockwise4, (words, absmax, *(nested or (absmax,) * 3), table), options, columns // 8)


# --- NVFP4 and MXFP4 -------------------------------------------------------------------------------------------------


@triton.jit
def e2m1(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    packed_ptr, scale_ptr, _, _, _, table_ptr, lanes, factor = weight
    codes = _nibbles(_words(packed_ptr, expert, row, rows, start, words, WORDS))
    v = _look_up_all(codes, lanes, table_ptr, OPTIONS)
    block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
    byte = tl.load(scale_ptr + block, mask=inside, other=0).to(tl.int32)
    if OPTIONS.scales == "e8m0":
        scale = e8m0_scale(byte)
    else:
        scale = e4m3_scale(byte) * factor
    return v, _spread(scale, WORDS)


def packed_e2m1(packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int]) -> Packed:
    words = packed.view(-1).view(torch.int32)
    table = codebook_e2m1(packed.device)
    options = Options(
        group=tile[1], tile_rows=tile[0], levels=16, factors=factor is not None,
        scales="e8m0" if factor is None else "e4m3",
    )  # fmt: skip
    factor = table if factor is None else factor
    return Packed(e2m1, (words, scales, table, factor, table, table), options, packed.shape[-1] // 4)


# --- bit planes: kbit and HQQ ----------------------------------------------------------------------------------------


@triton.jit
def _plane_words(codes_ptr, block, inside, J: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Nibble i: planes FIRST to FIRST + 3 of code 4i + J of a block of 32, int32 in the shape of `block`."""
    word = tl.zeros(block.shape, tl.int32)
    for plane in tl.static_range(FIRST, min(FIRST + 4, BITS)):
        bits = tl.load(codes_ptr + block * BITS + plane, mask=inside, other=0)
        if plane - FIRST < J:
            bits = bits >> (J - plane + FIRST)
        elif plane - FIRST > J:
            bits = bits << (plane - FIRST - J)
        if plane - FIRST == 3:
            word |= bits & -0x77777778  # 0x88888888
        else:
            word |= bits & (0x11111111 << (plane - FIRST))
    return word


@triton.jit
def _nibbles_of_planes(
    codes_ptr, block, inside, WORDS: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Words of eight nibbles from planes FIRST to FIRST + 3, int32 [rows, WORDS], in the order of `column_of`."""
    w0 = tl.trans(_plane_words(codes_ptr, block, inside, 0, FIRST, BITS))
    w1 = tl.trans(_plane_words(codes_ptr, block, inside, 1, FIRST, BITS))
    w2 = tl.trans(_plane_words(codes_ptr, block, inside, 2, FIRST, BITS))
    w3 = tl.trans(_plane_words(codes_ptr, block, inside, 3, FIRST, BITS))
    even = tl.join(w0, w2)
    odd = tl.join(w1, w3)
    return tl.reshape(tl.join(even, odd), (block.shape[1], WORDS))


@triton.jit
def _plane_codes(codes_ptr, expert, row, rows, start, words, WORDS: tl.constexpr, BITS: tl.constexpr):
    """Eight codes of each word, [rows, WORDS] each; higher bits are not cleared."""
    # [blocks, rows]: of addresses that are not adjacent, Triton puts those along dimension 0 in neighbouring lanes.
    at = start // 4 + tl.arange(0, WORDS // 4)
    block = (expert * rows + row)[None, :] * (words // 4) + at[:, None]
    inside = (row < rows)[None, :] & (at * 4 < words)[:, None]
    low = _nibbles_of_planes(codes_ptr, block, inside, WORDS, 0, BITS)
    codes = _nibbles(low)
    if BITS > 4:
        high = _nibbles_of_planes(codes_ptr, block, inside, WORDS, 4, BITS)
        even = (low & 0x0F0F0F0F) | ((high & 0x0F0F0F0F) << 4)
        odd = ((low >> 4) & 0x0F0F0F0F) | (high & -0x0F0F0F10)  # 0xF0F0F0F0
        codes = even, odd, even >> 8, odd >> 8, even >> 16, odd >> 16, even >> 24, odd >> 24
    return codes


@triton.jit
def kbit(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    packed_ptr, scale_ptr, zero_ptr, _, _, table_ptr, lanes, factor = weight
    codes = _plane_codes(packed_ptr, expert, row, rows, start, words, WORDS, OPTIONS.bits)
    v = _look_up_all(codes, lanes, table_ptr, OPTIONS)
    block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
    scale = e4m4(tl.load(scale_ptr + block, mask=inside, other=0)) * factor
    if OPTIONS.zeros:
        zero = _spread(tl.load(zero_ptr + block, mask=inside, other=0).to(tl.float32), WORDS)
        v = (v[0] - zero, v[1] - zero, v[2] - zero, v[3] - zero, v[4] - zero, v[5] - zero, v[6] - zero, v[7] - zero)
    return v, _spread(scale, WORDS)


def packed_kbit(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor, columns: int
) -> Packed:
    levels = codebook.shape[-1]
    options = Options(
        group=PLANE_BLOCK, bits=levels.bit_length() - 1, levels=levels, tables=codebook.dim() > 1, factors=True,
        strided=True, zeros=zeros is not None,
    )  # fmt: skip
    tensors = (packed, scales, scales if zeros is None else zeros, factor, scales, codebook)
    return Packed(kbit, tensors, options, ceil_div(columns, PLANE_BLOCK) * PLANE_BLOCK // 8)


@triton.jit
def hqq(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    packed_ptr, scale_ptr, zero_ptr, _, _, _, _, _ = weight
    codes = _plane_codes(packed_ptr, expert, row, rows, start, words, WORDS, OPTIONS.bits)
    block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
    scale = tl.load(scale_ptr + block, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + block, mask=inside, other=0.0).to(tl.float32)
    v = _differences(codes, 15 if OPTIONS.bits <= 4 else 255, _spread(zero, WORDS))
    return v, _spread(scale, WORDS)


def packed_hqq(packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, columns: int) -> Packed:
    options = Options(group=group, bits=bits, strided=True)
    return Packed(hqq, (packed, scales, zeros, scales, scales, scales), options, ceil_div(columns, group) * group // 8)


# --- GPTQ, AWQ and compressed-tensors --------------------------------------------------------------------------------


@triton.jit
def _int4_group(scale_ptr, zero_ptr, at, row, rows, inside, OPTIONS: tl.constexpr):
    """Zeros and scales, fp32, of the groups `at` [1, groups] of a stack's matrices."""
    zeros = tl.load(zero_ptr + at * (rows // 8) + (row // 8)[:, None], mask=inside, other=0)
    zeros = ((zeros >> ((row % 8) * 4)[:, None]) + OPTIONS.zero_shift) & 15
    scale = tl.load(scale_ptr + at * rows + row[:, None], mask=inside, other=0.0).to(tl.float32)
    return zeros.to(tl.float32), scale


@triton.jit
def _int4_column(column, weight, expert, row, rows, words, inside, OPTIONS: tl.constexpr):
    """Scaled values of one column of each word, where neighbouring columns may be of different groups."""
    qweight_ptr, scale_ptr, zero_ptr, _, index_ptr, _, _, _ = weight
    if OPTIONS.ordered:  # codes are sorted by group
        source = tl.load(index_ptr + (2 * expert + 1) * words * 8 + column, mask=column < words * 8, other=0)
        group = source // OPTIONS.group
    else:
        source = column
        group = column // OPTIONS.group
    if OPTIONS.indexed:
        group = tl.load(index_ptr + expert * words * 8 + column, mask=column < words * 8, other=0)
    at = (expert * words + source // 8)[None, :] * rows + row[:, None]
    word = tl.load(qweight_ptr + at, mask=inside, other=0)
    at = (expert * (words * 8 // OPTIONS.group) + group)[None, :]
    zero, scale = _int4_group(scale_ptr, zero_ptr, at, row, rows, inside, OPTIONS)
    return _difference(word >> ((source % 8) * 4)[None, :], 15, zero) * scale


@triton.jit
def int4(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    """Words run along the rows: [K/8, N]."""
    qweight_ptr, scale_ptr, zero_ptr, _, _, _, _, _ = weight
    word = start + tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    if OPTIONS.ordered or OPTIONS.indexed or OPTIONS.group % 8 != 0:
        k = word * 8
        v = (
            _int4_column(k, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 1, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 2, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 3, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 4, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 5, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 6, weight, expert, row, rows, words, inside, OPTIONS),
            _int4_column(k + 7, weight, expert, row, rows, words, inside, OPTIONS),
        )
        scale = tl.full((row.shape[0], WORDS), 1.0, tl.float32)
    else:
        at = (expert * words + word)[None, :] * rows + row[:, None]
        codes = _nibbles(tl.load(qweight_ptr + at, mask=inside, other=0))
        group = _groups(start, WORDS, OPTIONS.group)
        groups = words * 8 // OPTIONS.group
        of_group = (row < rows)[:, None] & (group < groups)[None, :]
        at = (expert * groups + group)[None, :]
        zero, scale = _int4_group(scale_ptr, zero_ptr, at, row, rows, of_group, OPTIONS)
        v = _differences(codes, 15, _spread(zero, WORDS))
        scale = _spread(scale, WORDS)
    return v, scale


def packed_int4(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, order: Tensor | None, zero_shift: int
) -> Packed:
    columns = qweight.shape[-2] * 8
    options = Options(
        group=columns // scales.shape[-2], zero_shift=zero_shift, indexed=group_index is not None,
        ordered=order is not None,
    )  # fmt: skip
    index = next((tensor for tensor in (group_index, order) if tensor is not None), qzeros)
    return Packed(int4, (qweight, scales, qzeros, scales, index, scales), options, columns // 8)


# --- INT8 and FP8 ----------------------------------------------------------------------------------------------------


@triton.jit
def _byte_words(codes_ptr, expert, row, rows, start, words, WORDS: tl.constexpr):
    """Two 4-byte words of codes, [rows, WORDS] each, for every eight columns."""
    pairs = _words(codes_ptr, expert, row, rows, start, words, WORDS)
    return pairs.to(tl.int32), (pairs >> 32).to(tl.int32)


@triton.jit
def int8(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    codes_ptr, absmax_ptr, _, _, _, _, _, _ = weight
    low, high = _byte_words(codes_ptr, expert, row, rows, start, words, WORDS)
    low, high = low ^ -0x7F7F7F80, high ^ -0x7F7F7F80  # 0x80808080: codes plus 128
    codes = low, low >> 8, low >> 16, low >> 24, high, high >> 8, high >> 16, high >> 24
    block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
    scale = tl.load(absmax_ptr + block, mask=inside, other=0.0) * INVERSE_127
    return _differences(codes, 255, 128.0), _spread(scale, WORDS)


@triton.jit
def _e4m3(code):
    """Decode the E4M3 code in the highest byte of a word: its bits are those of fp32, whose bias is 120 more."""
    bits = (code >> 4) & -0x78100000  # 0x87F00000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120; exact, of subnormal codes, too


@triton.jit
def float8(weight, expert, row, rows, start, words, WORDS: tl.constexpr, OPTIONS: tl.constexpr):
    codes_ptr, scale_ptr, _, _, _, _, _, factor = weight
    low, high = _byte_words(codes_ptr, expert, row, rows, start, words, WORDS)
    v = (
        _e4m3(low << 24), _e4m3(low << 16), _e4m3(low << 8), _e4m3(low),
        _e4m3(high << 24), _e4m3(high << 16), _e4m3(high << 8), _e4m3(high),
    )  # fmt: skip
    if OPTIONS.factors:
        scale = tl.full((row.shape[0], WORDS), 1.0, tl.float32) * factor
    else:
        block, inside = _blocks(expert, row, rows, start, words, WORDS, OPTIONS)
        scale = _spread(tl.load(scale_ptr + block, mask=inside, other=0.0), WORDS)
    return v, scale


def packed_bytes(codes: Tensor, scale: Tensor, scaling: Scaling) -> Packed:
    """INT8 or FP8 codes, whose rows are multiples of eight."""
    words = codes.view(-1).view(torch.int64)
    size = TILE if scaling == "tile" else WHOLE_ROW
    options = Options(group=size, tile_rows=TILE if scaling == "tile" else 1, factors=scaling == "tensor")
    decoder = int8 if codes.dtype is torch.int8 else float8
    return Packed(decoder, (words, *(scale,) * 5), options, codes.shape[-1] // 8)


# --- packed weights --------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A weight as the kernels take it.

    Args:
        decoder: function of this module.
        tensors: codes, scales, zeros, factors, group index and table, or stand-ins. For E stacked
            matrices, each tensor is the concatenation over the matrices.
        options: constants of the decoder.
        words: words of eight columns in a stored row, padding included.
    """

    decoder: Any
    tensors: tuple[Tensor, ...]
    options: Options
    words: int


def shuffles(x: Tensor) -> bool:
    """Return whether tables are looked up by warp shuffles, which only NVIDIA's GPUs have."""
    return device_of(x).backend == "cuda"


def obstacle(tensors: tuple[Tensor, ...]) -> str | None:
    """Return why no decoder reads these tensors of a weight, or None."""
    if tensors[0].numel() * tensors[0].element_size() >= 4 * MOST_WORDS:
        return "needs less than 2^33 bytes of codes"
    if any(not tensor.is_contiguous() for tensor in tensors):
        return "needs contiguous tensors"
    return None


def stack_obstacle(stack: StackedWeight) -> str | None:
    """Return why a stack is decoded before its products, or None."""
    format_, columns = matrix_format(stack.format), stack.shape[2]
    if format_ is None:
        return "is not quantized"
    if isinstance(format_, Blockwise4) and columns % format_.blocksize:
        return "needs whole blocks in a row"
    if isinstance(format_, Aqlm):
        return "has no decoder"
    if "order" in stack.parts and not isinstance(format_, Int4):
        return "needs inputs in their order"
    if isinstance(format_, Int8 | Float8) and columns % 8:
        return "needs rows in multiples of 8"
    return obstacle(tuple(stack.parts.values()))


def matrix_format(format_: Format | None) -> Format | None:
    """The format of one matrix of a stack."""
    return format_.matrix_format if isinstance(format_, Stack) else format_


def packed_stack(stack: StackedWeight) -> Packed:
    """A stack without an obstacle, as kernels take it."""
    format_ = matrix_format(stack.format)
    parts = stack.parts
    columns = stack.shape[2]
    match format_:
        case Blockwise4():
            options = format_.blocksize, format_.quant_type
            return packed_blockwise4(parts["packed"], parts["absmax"], format_.nested_parts(parts), *options, columns)
        case Nvfp4():
            return packed_e2m1(parts["packed"], parts["scale"], parts["factor"], format_.tile)
        case Mxfp4():
            return packed_e2m1(parts["packed"], parts["scale"], None, (1, MX_BLOCK))
        case KBit():
            tables = parts.get("zeros"), parts["factor"], format_.levels(parts)
            return packed_kbit(parts["packed"], parts["scales"], *tables, columns)
        case HQQ():
            return packed_hqq(parts["packed"], parts["scales"], parts["zeros"], format_.bits, format_.group, columns)
        case Int4():
            groups = parts.get("g_idx"), parts.get("order")
            return packed_int4(parts["qweight"], parts["qzeros"], parts["scales"], *groups, format_.zero_shift)
        case Int8():
            return packed_bytes(parts["codes"], parts["absmax"], "row")
        case Float8():
            return packed_bytes(parts["codes"], parts["scale"], format_.scaling)
    raise TypeError(f"no decoder reads {format_}")
