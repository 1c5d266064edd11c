"""Triton: GEMV and small-batch GEMM with a 4-bit weight, decoded in registers.

Measured on an H200 (4096×14336, nested scales): 17.6 µs for one row, 34 for 4 to 16, 42 for 64, against 31-36 for
cuBLAS on a dense bf16 weight, and some 70 for dequantizing first. Both kernels read the weight once. At 4 TB/s that is
23 weights per clock and SM, so the bound is not memory but the conversion of codes to values: a warp's shuffle unit and
its load unit each process 32 lanes a clock. With `SHUFFLE` the codebook is in the lanes of a warp, and a look-up is one
shift and one shuffle. The hardware takes the shuffle's index modulo 32 and the codebook is stored twice, so a code
needs no mask. Elsewhere (ROCm, the interpreter) a look-up is a load from the L1 cache.

`_gemv`, up to `GEMV_ROWS` rows of x: no tensor cores. A program has a few rows of W. Its threads split K; each has its
values of x in registers for all these rows, and sums in fp32.

`_gemm`, up to `GEMM_ROWS`: values are scaled and rounded to x's dtype as in dequantization, and multiplied by tensor
cores with W as the left operand. Programs also split K where N alone would not fill the device. `_add` sums their fp32
results in a fixed order, so the result does not depend on timing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.blockwise4 import NESTED_BLOCK, linear_blockwise4
from ...formats.codebooks import codebook4
from ...formats.linear import add_term
from ..device import device_of
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

GEMV_ROWS = 3  # in 16 bits; from 4 on the tensor cores are as fast. fp32 cannot use them and has up to 4
GEMM_ROWS = 64


@triton.jit
def _lanes(codebook_ptr, SHUFFLE: tl.constexpr):
    """This lane's codebook entry, modulo 16: a scalar in Triton, with a different value in each lane."""
    if SHUFFLE:
        lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
        return tl.load(codebook_ptr + (lane & 15))
    return tl.load(codebook_ptr)


@triton.jit
def _decode(codes, lanes, codebook_ptr, SHUFFLE: tl.constexpr):
    """Decode each 4-byte word to eight values in the order of K: the high nibble of each byte comes first."""
    if SHUFFLE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 n;
            shr.u32 n, $8, 4;
            shfl.sync.idx.b32 $0, $9, n, 0x1f, 0xffffffff;
            shfl.sync.idx.b32 $1, $9, $8, 0x1f, 0xffffffff;
            shr.u32 n, $8, 12;
            shfl.sync.idx.b32 $2, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 8;
            shfl.sync.idx.b32 $3, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 20;
            shfl.sync.idx.b32 $4, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 16;
            shfl.sync.idx.b32 $5, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 28;
            shfl.sync.idx.b32 $6, $9, n, 0x1f, 0xffffffff;
            shr.u32 n, $8, 24;
            shfl.sync.idx.b32 $7, $9, n, 0x1f, 0xffffffff;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,f",
            [codes, lanes],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return (
        tl.load(codebook_ptr + ((codes >> 4) & 15)),
        tl.load(codebook_ptr + (codes & 15)),
        tl.load(codebook_ptr + ((codes >> 12) & 15)),
        tl.load(codebook_ptr + ((codes >> 8) & 15)),
        tl.load(codebook_ptr + ((codes >> 20) & 15)),
        tl.load(codebook_ptr + ((codes >> 16) & 15)),
        tl.load(codebook_ptr + ((codes >> 28) & 15)),
        tl.load(codebook_ptr + ((codes >> 24) & 15)),
    )


@triton.jit
def _scales(
    absmax_ptr, second_ptr, code_ptr, offset_ptr, row, rows, start, words,
    ROWS: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr, NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale of each word, fp32 [ROWS, WORDS], read once per block."""
    column = start // PER_BLOCK + tl.arange(0, WORDS // PER_BLOCK)
    block = row[:, None] * (words // PER_BLOCK) + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] * PER_BLOCK < words)
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        second = tl.load(second_ptr + block // NESTED_BLOCK, mask=mask, other=0.0)
        scale = tl.load(code_ptr + q) * second + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    shape: tl.constexpr = (ROWS, WORDS // PER_BLOCK, PER_BLOCK)
    return tl.reshape(tl.broadcast_to(scale[:, :, None], shape), (ROWS, WORDS))


@triton.jit
def _split(x, WORDS: tl.constexpr):
    """Split [WORDS, 8] into eight columns."""
    even, odd = tl.split(tl.reshape(x, (WORDS, 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _dot8(v, x_ptr, w, words, WORDS: tl.constexpr):
    """Sum of each word's eight products with one row of x, [ROWS, WORDS]."""
    eight = tl.arange(0, 8)
    x = tl.load(x_ptr + w[:, None] * 8 + eight[None, :], mask=(w < words)[:, None], other=0.0).to(tl.float32)
    x = _split(x, WORDS)
    total = v[0] * x[0][None, :]
    for i in tl.static_range(1, 8):
        total += v[i] * x[i][None, :]
    return total


@triton.jit(do_not_specialize=["words"])
def _gemv(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, x_ptr, bias_ptr, out_ptr, rows, words,
    M: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, VECTOR: tl.constexpr, PER_BLOCK: tl.constexpr,
    NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr, BIAS: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    if VECTOR > 1:  # a thread reads VECTOR words at once: Triton infers this from the divisibility of a row's length
        words = tl.multiple_of(words, VECTOR)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = _lanes(codebook_ptr, SHUFFLE)
    zeros = tl.zeros((ROWS, WORDS), tl.float32)
    acc0 = zeros
    acc1 = zeros
    acc2 = zeros
    acc3 = zeros
    for start in range(0, words, WORDS):
        w = start + tl.arange(0, WORDS)
        mask = (row[:, None] < rows) & (w[None, :] < words)
        codes = tl.load(packed_ptr + (row[:, None] * words + w[None, :]), mask=mask, other=0)
        scale = _scales(
            absmax_ptr, second_ptr, code_ptr, offset_ptr, row, rows, start, words,
            ROWS, WORDS, PER_BLOCK, NESTED, NESTED_BLOCK,
        )  # fmt: skip
        v = _decode(codes, lanes, codebook_ptr, SHUFFLE)
        acc0 += _dot8(v, x_ptr, w, words, WORDS) * scale
        if M > 1:
            acc1 += _dot8(v, x_ptr + words * 8, w, words, WORDS) * scale
        if M > 2:
            acc2 += _dot8(v, x_ptr + words * 16, w, words, WORDS) * scale
        if M > 3:
            acc3 += _dot8(v, x_ptr + words * 24, w, words, WORDS) * scale
    _finish(acc0, bias_ptr, out_ptr, row, rows, BIAS)
    if M > 1:
        _finish(acc1, bias_ptr, out_ptr + rows, row, rows, BIAS)
    if M > 2:
        _finish(acc2, bias_ptr, out_ptr + 2 * rows, row, rows, BIAS)
    if M > 3:
        _finish(acc3, bias_ptr, out_ptr + 3 * rows, row, rows, BIAS)


@triton.jit
def _finish(acc, bias_ptr, out_ptr, row, rows, BIAS: tl.constexpr):
    y = tl.sum(acc, axis=1)
    if BIAS:
        y += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row < rows)


@triton.jit
def _gemm(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, x_ptr, part_ptr, rows, words, batch, splits,
    M: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, PER_BLOCK: tl.constexpr,
    NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr, SHUFFLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = program // splits * ROWS + tl.arange(0, ROWS)
    split = program % splits
    m = tl.arange(0, M)
    lanes = _lanes(codebook_ptr, SHUFFLE)
    acc = tl.zeros((ROWS, M), tl.float32)
    steps = tl.cdiv(tl.cdiv(words, WORDS), splits)
    for step in tl.range(split * steps, (split + 1) * steps, num_stages=STAGES):
        start = step * WORDS
        w = start + tl.arange(0, WORDS)
        mask = (row[:, None] < rows) & (w[None, :] < words)
        codes = tl.load(packed_ptr + (row[:, None] * words + w[None, :]), mask=mask, other=0)
        scale = _scales(
            absmax_ptr, second_ptr, code_ptr, offset_ptr, row, rows, start, words,
            ROWS, WORDS, PER_BLOCK, NESTED, NESTED_BLOCK,
        )  # fmt: skip
        v = _decode(codes, lanes, codebook_ptr, SHUFFLE)
        even = tl.join(tl.join(v[0] * scale, v[4] * scale), tl.join(v[2] * scale, v[6] * scale))
        odd = tl.join(tl.join(v[1] * scale, v[5] * scale), tl.join(v[3] * scale, v[7] * scale))
        weight = tl.reshape(tl.join(even, odd).to(x_ptr.dtype.element_ty), (ROWS, 8 * WORDS))
        k = start * 8 + tl.arange(0, 8 * WORDS)
        inside = (m[:, None] < batch) & (k[None, :] < words * 8)
        x = tl.load(x_ptr + (m[:, None] * (words * 8) + k[None, :]), mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    at = (split * batch + m[None, :]) * rows + row[:, None]
    tl.store(part_ptr + at, acc, mask=(m[None, :] < batch) & (row[:, None] < rows))


@triton.jit
def _add(
    part_ptr, bias_ptr, out_ptr, rows, numel, SPLITS: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < numel
    total = tl.load(part_ptr + at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + split * numel + at, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


Nested = tuple[Tensor, Tensor, Tensor] | None
Term = tuple[Tensor, Tensor] | None
_gemv_launcher = Launcher(_gemv)
_gemm_launcher = Launcher(_gemm)
_add_launcher = Launcher(_add)
ADDED = 1024  # values that a program of `_add` sums


def shuffles(x: Tensor) -> bool:
    """Return whether the codebook is looked up by warp shuffles, which only NVIDIA's GPUs have."""
    return device_of(x).backend == "cuda"


class GemvBlocks(NamedTuple):
    """Rows of W per program, 4-byte words of each row per iteration, and adjacent words that a thread reads."""

    rows: int
    words: int
    vector: int


class GemmBlocks(NamedTuple):
    """Rows of W and 4-byte words of each per iteration, parts of K, and pipeline stages."""

    rows: int
    words: int
    splits: int
    stages: int


def gemv_blocks(batch: int) -> GemvBlocks:
    """The fastest blocks for `batch` rows of x, of a sweep on an H200."""
    return GemvBlocks(8, 256, 1) if batch == 1 else GemvBlocks(4, 128, 1)


def gemm_blocks(rows: int, batch: int) -> GemmBlocks:
    """Best blocks for a weight of `rows` rows; K is split until there are about two programs per multiprocessor."""
    tile, words = (64, 32) if batch <= 32 else (128, 16)
    return GemmBlocks(tile, words, min(max(256 // ceil_div(rows, tile), 1), 8), 3)


def _obstacle(x: Tensor, packed: Tensor, blocksize: int, words: int) -> str | None:
    """Return why neither kernel supports a call, or None. Indices of words must fit in 31 bits."""
    if not x.shape[0] or x.shape[1] % blocksize or packed.numel() >= 2**33:
        return "needs rows, whole blocks in one, and less than 2^33 bytes"
    return "needs smaller blocks" if blocksize > 8 * words else None


def gemv_obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, *_: Any) -> str | None:
    if x.shape[0] > GEMV_ROWS and not (x.shape[0] == 4 and x.dtype is torch.float32):
        return "takes 1 to 3 rows, or 4 in fp32"
    return _obstacle(x, packed, blocksize, gemv_blocks(x.shape[0]).words)


def gemm_obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int, *_: Any
) -> str | None:
    if x.shape[0] > GEMM_ROWS or x.dtype is torch.float32:
        return "takes up to 64 rows of 16 bits"
    return _obstacle(x, packed, blocksize, gemm_blocks(rows, x.shape[0]).words)


@linear_blockwise4.kernel("cuda", "xpu", unless=gemv_obstacle, rank=4)
def gemv(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: Term = None, blocks: GemvBlocks | None = None,
) -> Tensor:  # fmt: skip
    x, (batch, columns) = x.contiguous(), x.shape
    blocks = blocks or gemv_blocks(batch)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    _gemv_launcher(
        ceil_div(rows, blocks.rows),
        (*_weight(packed, absmax, nested, quant_type), x, x if bias is None else bias, out),
        (rows, columns // 8),
        (batch, *blocks, blocksize // 8, nested is not None, NESTED_BLOCK, bias is not None, shuffles(x)),
        warps=blocks.words // (32 * blocks.vector),
    )
    return add_term(out, term)


@linear_blockwise4.kernel("cuda", "xpu", unless=gemm_obstacle, rank=5)
def gemm(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: Term = None, blocks: GemmBlocks | None = None,
) -> Tensor:  # fmt: skip
    x, (batch, columns) = x.contiguous(), x.shape
    blocks = blocks or gemm_blocks(rows, batch)
    partial = torch.empty(blocks.splits, batch, rows, dtype=torch.float32, device=x.device)
    _gemm_launcher(
        ceil_div(rows, blocks.rows) * blocks.splits,
        (*_weight(packed, absmax, nested, quant_type), x, partial),
        (rows, columns // 8, batch, blocks.splits),
        (max(power_of_2(batch), 16), blocks.rows, blocks.words, blocksize // 8, nested is not None,
         NESTED_BLOCK, shuffles(x), blocks.stages),
        warps=8 if blocks.rows >= 128 else 4,
    )  # fmt: skip
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    _add_launcher(
        ceil_div(out.numel(), ADDED),
        (partial, out if bias is None else bias, out),
        (rows, out.numel()),
        (blocks.splits, bias is not None, ADDED),
        warps=4,
    )
    return add_term(out, term)


def _weight(packed: Tensor, absmax: Tensor, nested: Nested, quant_type: str) -> tuple[Tensor, ...]:
    """Pointers of the weight, which come first in both kernels."""
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    return packed.view(-1).view(torch.int32), absmax, second, code, offset, codebook4(quant_type, packed.device)
