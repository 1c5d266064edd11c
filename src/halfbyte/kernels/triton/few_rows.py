"""Triton: products of few rows of x with packed weights of every format, decoded in registers (`decoders`).

`_gemv`, up to `GEMV_ROWS` rows of x: no tensor cores. A program has a few rows of W. Its threads split K; each has its
values of x in registers for all these rows, and sums in fp32 without rounding the weights.

`_gemm`, up to `GEMM_ROWS`: values are scaled and rounded to x's dtype as in dequantization, and multiplied by tensor
cores with W as the left operand. Programs also split K where N alone would not fill the device. `_add` sums their fp32
results in a fixed order, so the result does not depend on timing.

`expert_rows`, the MLP of a few tokens with stacked experts: `_expert_up` multiplies by the first matrices of all chosen
experts and applies their unit; `_gemv` multiplies by the second ones, of the expert of each row. One token of
Qwen3-30B-A3B's shapes with 8 experts takes 20 to 23 µs on an H200 with NF4, kbit3, int4, NVFP4, FP8 or INT8 (the sum of
three launches in CUDA graphs); decoding the stacks of all 128 experts takes 390 to 400.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.bitplane import linear_bitplane
from ...formats.blockwise4 import linear_blockwise4
from ...formats.e2m1 import linear_e2m1
from ...formats.float8 import Scaling, linear_float8
from ...formats.hqq import linear_hqq
from ...formats.int4 import linear_int4
from ...ops import experts
from ...ops.experts import StackedWeight, Unit
from ..tiling import ceil_div, power_of_2
from . import decoders
from .decoders import Packed, shuffles
from .experts import activate_unit, combine_slots
from .launch import Launcher

GEMV_ROWS = 1  # in 16 bits: from 2 on the tensor cores are as fast
GEMM_ROWS = 64
FP32_ROWS = 4  # which tensor cores do not multiply
ADDED = 1024  # values that a program of `_add` sums
SLOTS = 16  # over all tokens; with more, tokens share experts and grouped GEMMs read each expert once


@triton.jit
def _columns(x_ptr, word, depth, OPTIONS: tl.constexpr):
    """Values fp32 [words] of x at each of the eight columns of some words."""
    words: tl.constexpr = word.shape[0]
    column = decoders.column_of(word[:, None], tl.arange(0, 8)[None, :], OPTIONS)
    x = tl.load(x_ptr + column, mask=column < depth, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(x, (words, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _partial_sums(
    weight, expert, row, rows, words, x_ptr, depth, WORDS: tl.constexpr, DECODER: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """Partial sums fp32 [rows, WORDS] of the products of one row of x with some rows of a matrix."""
    acc = tl.zeros((row.shape[0], WORDS), tl.float32)
    for start in range(0, words, WORDS):
        x = _columns(x_ptr, start + tl.arange(0, WORDS), depth, OPTIONS)
        v, scale = DECODER(weight, expert, row, rows, start, words, WORDS, OPTIONS)
        total = v[0] * x[0][None, :]
        for i in tl.static_range(1, 8):
            total += v[i] * x[i][None, :]
        acc += total * scale
    return acc


@triton.jit
def _gemv(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, chosen_ptr, bias_ptr, out_ptr,
    rows, depth, words,
    DECODER: tl.constexpr, OPTIONS: tl.constexpr, STACKED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """One row of x with some rows of the matrix; with STACKED, of the expert that is chosen for the row of x."""
    blocks = tl.cdiv(rows, ROWS)
    m = tl.program_id(0) // blocks
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    expert = 0
    if STACKED:
        expert = tl.load(chosen_ptr + m).to(tl.int32)
    weight = decoders.opened((codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr), expert, OPTIONS)
    acc = _partial_sums(weight, expert, row, rows, words, x_ptr + m * depth, depth, WORDS, DECODER, OPTIONS)
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * rows + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _gemm(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, partial_ptr,
    rows, depth, words, batch, splits,
    DECODER: tl.constexpr, OPTIONS: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(0) % splits
    m = tl.arange(0, M)
    weight = decoders.opened((codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr), 0, OPTIONS)
    acc = tl.zeros((ROWS, M), tl.float32)
    steps = tl.cdiv(tl.cdiv(words * 8, COLUMNS), splits)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        w = decoders.values(weight, 0, row, rows, step * COLUMNS, words, x_ptr, COLUMNS // 8, DECODER, OPTIONS)
        k = step * COLUMNS + tl.arange(0, COLUMNS)
        inside = (m[:, None] < batch) & (k[None, :] < depth)
        x = tl.load(x_ptr + m[:, None] * depth + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    at = (split * batch + m[None, :]) * rows + row[:, None]
    tl.store(partial_ptr + at, acc, mask=(m[None, :] < batch) & (row[:, None] < rows))


@triton.jit
def _add(
    partial_ptr, bias_ptr, out_ptr, rows, numel, SPLITS: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < numel
    total = tl.load(partial_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(partial_ptr + split * numel + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _expert_up(
    x_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, chosen_ptr, out_ptr,
    width, depth, words, limit, alpha, offset,
    DECODER: tl.constexpr, OPTIONS: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """h [slots, width]: the unit of gate and up, which are computed as one tile of twice as many rows."""
    blocks = tl.cdiv(width, ROWS)
    slot = tl.program_id(0) // blocks
    channel = tl.program_id(0) % blocks * ROWS
    both = tl.arange(0, 2 * ROWS)
    if INTERLEAVED:
        row = 2 * channel + both
    else:  # a gate, then its up
        row = (both % 2) * width + channel + both // 2
        row = tl.where(channel + both // 2 < width, row, 2 * width)
    expert = tl.load(chosen_ptr + slot).to(tl.int32)
    weight = decoders.opened((codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr), expert, OPTIONS)
    x_row = x_ptr + slot // TOP_K * depth
    acc = _partial_sums(weight, expert, row, 2 * width, words, x_row, depth, WORDS, DECODER, OPTIONS)
    c = tl.sum(acc, axis=1).to(out_ptr.dtype.element_ty).to(tl.float32)  # as the product's result is rounded
    g, u = tl.split(tl.reshape(c, (ROWS, 2)))
    activated, _, shifted = activate_unit(g, u, limit, alpha, offset, ACTIVATION)
    o = channel + tl.arange(0, ROWS)
    tl.store(out_ptr + slot * width + o, (activated * shifted).to(out_ptr.dtype.element_ty), mask=o < width)


_gemv_launcher = Launcher(_gemv)
_gemm_launcher = Launcher(_gemm)
_add_launcher = Launcher(_add)
_up_launcher = Launcher(_expert_up)


class GemvBlocks(NamedTuple):
    """Rows of W per program, words of eight columns of each row per iteration, and warps."""

    rows: int
    words: int
    warps: int


class GemmBlocks(NamedTuple):
    """Rows of W and columns of each per iteration, parts of K, pipeline stages, and warps."""

    rows: int
    columns: int
    splits: int
    stages: int
    warps: int


def gemv_blocks(words: int, stacked: bool) -> GemvBlocks:
    """The fastest blocks of a sweep over formats on an H200, for 4096 columns, or 768 of eight experts each."""
    wide = min(max(power_of_2(words), 32), 256)
    return GemvBlocks(16, 32, 1) if stacked else GemvBlocks(8, wide, wide // 32)


def up_blocks(words: int) -> GemvBlocks:
    """The fastest blocks of a sweep over formats on an H200, for 2048 columns."""
    return GemvBlocks(4, min(max(power_of_2(words), 32), 64), 1)


def gemm_blocks(rows: int, batch: int) -> GemmBlocks:
    """Best blocks for a weight of `rows` rows; K is split until there are about two programs per multiprocessor."""
    tile, stages, warps = (128, 3, 8) if batch <= 32 else (64, 4, 4)
    return GemmBlocks(tile, 128, min(max(256 // ceil_div(rows, tile), 1), 8), stages, warps)


def gemv(
    x: Tensor, packed: Packed, rows: int, bias: Tensor | None, blocks: GemvBlocks | None = None,
    chosen: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[M, N] = x·Wᵀ + b; with integers `chosen` [M], W of a stack's expert for each row of x."""
    x, (batch, depth) = x.contiguous(), x.shape
    blocks = blocks or gemv_blocks(packed.words, chosen is not None)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    _gemv_launcher(
        batch * ceil_div(rows, blocks.rows),
        (x, *packed.tensors, x if chosen is None else chosen, x if bias is None else bias, out),
        (rows, depth, packed.words),
        (packed.decoder, packed.options._replace(shuffle=shuffles(x)), chosen is not None, bias is not None,
         blocks.rows, blocks.words),
        blocks.warps,
    )  # fmt: skip
    return out


def gemm(x: Tensor, packed: Packed, rows: int, bias: Tensor | None, blocks: GemmBlocks | None = None) -> Tensor:
    x, (batch, depth) = x.contiguous(), x.shape
    blocks = blocks or gemm_blocks(rows, batch)
    blocks = blocks._replace(stages=1) if packed.options.by_column else blocks
    partial = torch.empty(blocks.splits, batch, rows, dtype=torch.float32, device=x.device)
    _gemm_launcher(
        ceil_div(rows, blocks.rows) * blocks.splits,
        (x, *packed.tensors, partial),
        (rows, depth, packed.words, batch, blocks.splits),
        (packed.decoder, packed.options._replace(shuffle=shuffles(x)), max(power_of_2(batch), 16), blocks.rows,
         blocks.columns, blocks.stages),
        warps=blocks.warps,
    )  # fmt: skip
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    _add_launcher(
        ceil_div(out.numel(), ADDED),
        (partial, out if bias is None else bias, out),
        (rows, out.numel()),
        (blocks.splits, bias is not None, ADDED),
        warps=4,
    )
    return out


def product(x: Tensor, packed: Packed, rows: int, bias: Tensor | None) -> Tensor:
    """[M, N] = x·Wᵀ + b."""
    is_small = x.shape[0] <= GEMV_ROWS or x.dtype is torch.float32
    return gemv(x, packed, rows, bias) if is_small else gemm(x, packed, rows, bias)


def obstacle(x: Tensor, *arguments: Any) -> str | None:
    """Return why neither kernel takes a linear's arguments, or None."""
    largest = FP32_ROWS if x.dtype is torch.float32 else GEMM_ROWS
    if not 1 <= x.shape[0] <= largest or not x.shape[1]:
        return f"takes 1 to {GEMM_ROWS} rows of 16 bits, or {FP32_ROWS} of 32"
    return decoders.obstacle(tuple(argument for argument in arguments if isinstance(argument, Tensor)))


# --- linears of each format ------------------------------------------------------------------------------------------


def blockwise4_obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Any, blocksize: int, *_: Any) -> str | None:
    return "needs whole blocks in a row" if x.shape[1] % blocksize else obstacle(x, packed, absmax)


@linear_blockwise4.kernel("cuda", "xpu", unless=blockwise4_obstacle, rank=8)
def blockwise4(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: tuple[Tensor, Tensor, Tensor] | None, blocksize: int,
    quant_type: str, rows: int, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = decoders.packed_blockwise4(packed, absmax, nested, blocksize, quant_type, x.shape[1])
    return product(x, weight, rows, bias)


@linear_bitplane.kernel("cuda", "xpu", unless=obstacle, rank=8)
def bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    return product(x, decoders.packed_kbit(packed, scales, None, factor, codebook, x.shape[1]), rows, bias)


@linear_hqq.kernel("cuda", "xpu", unless=obstacle, rank=8)
def hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    return product(x, decoders.packed_hqq(packed, scales, zeros, bits, group, x.shape[1]), rows, bias)


@linear_int4.kernel("cuda", "xpu", unless=obstacle, rank=8)
def int4(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, order: Tensor | None,
    zero_shift: int, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    if order is not None:
        x = x.index_select(1, order[0])
    weight = decoders.packed_int4(qweight, qzeros, scales, group_index, None, zero_shift)
    return product(x, weight, scales.shape[1], bias)


@linear_e2m1.kernel("cuda", "xpu", unless=obstacle, rank=8)
def e2m1(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], bias: Tensor | None
) -> Tensor:
    return product(x, decoders.packed_e2m1(packed, scales, factor, tile), packed.shape[0], bias)


def float8_obstacle(x: Tensor, codes: Tensor, scale: Tensor, *_: Any) -> str | None:
    return "needs K in multiples of 8" if x.shape[1] % 8 else obstacle(x, codes, scale)


@linear_float8.kernel("cuda", "xpu", unless=float8_obstacle, rank=8)  # after gemv8, which needs conversions to FP8
def float8(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    return product(x, decoders.packed_bytes(codes, scale, scaling), codes.shape[0], bias)


# --- experts ---------------------------------------------------------------------------------------------------------


def expert_rows_obstacle(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor
) -> str | None:
    if not 0 < index.numel() <= SLOTS:
        return f"takes 1 to {SLOTS} choices"
    reasons = (decoders.stack_obstacle(stack) for stack in (first, second))
    return next((reason for reason in reasons if reason), None)


@experts.expert_rows.kernel("cuda", "xpu", unless=expert_rows_obstacle, rank=1)
def expert_rows(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor,
    blocks: tuple[GemvBlocks, GemvBlocks] | None = None,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    index = index.contiguous()
    top_k = index.shape[1]
    up, down = decoders.packed_stack(first), decoders.packed_stack(second)
    up_tile, down_tile = blocks or (up_blocks(up.words), gemv_blocks(down.words, True))
    inner, outer = first.shape[1] // 2, second.shape[1]
    hidden = torch.empty(index.numel(), inner, dtype=x.dtype, device=x.device)
    _up_launcher(
        index.numel() * ceil_div(inner, up_tile.rows),
        (x, *up.tensors, index, hidden),
        (inner, x.shape[1], up.words, unit.limit, unit.alpha, unit.offset),
        (up.decoder, up.options._replace(shuffle=shuffles(x)), top_k, unit.activation, unit.interleaved, up_tile.rows,
         up_tile.words),
        up_tile.warps,
    )  # fmt: skip
    rows = gemv(hidden, down, outer, None, down_tile, index)
    return combine_slots(rows, None, top_k, routed)
