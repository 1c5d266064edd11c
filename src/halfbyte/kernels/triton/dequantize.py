"""Triton: dequantization through `decoders`, of a matrix or of stacked ones in one launch.

Bound by memory. Measured on an H200 (torch 2.11, Triton 3.6), 128 experts of 1536×2048 in bf16: 269 µs for kbit3 and
255 for int4 in groups of 128, where NF4's own kernel takes 249; 128 experts of 2048×768 take 137, 142 and 141.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.bitplane import dequantize_bitplane
from ...formats.hqq import dequantize_hqq
from ...formats.int4 import PACK, dequantize_int4
from ..tiling import ceil_div
from . import decoders
from .decoders import Packed, shuffles
from .launch import Launcher

ROWS, WORDS = 64, 16  # rows, and words of eight columns, that a program decodes: the fastest of six on an H200


@triton.jit
def _decode(
    codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, out_ptr, rows, columns, words,
    DECODER: tl.constexpr, OPTIONS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    across, down = tl.cdiv(columns, 8 * WORDS), tl.cdiv(rows, ROWS)
    matrix = tl.program_id(0) // (across * down)
    row = tl.program_id(0) // across % down * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % across * 8 * WORDS
    weight = decoders.opened((codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr), matrix, OPTIONS)
    values = decoders.values(weight, matrix, row, rows, start, words, out_ptr, WORDS, DECODER, OPTIONS)
    column = start + tl.arange(0, 8 * WORDS)
    at = (matrix.to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, values, mask=(row < rows)[:, None] & (column < columns)[None, :])


_launcher = Launcher(_decode, enable_fp_fusion=False)


def decode(packed: Packed, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values of a matrix or a stack of `shape`."""
    *_, rows, columns = shape
    out = torch.empty(shape, dtype=dtype, device=packed.tensors[0].device)
    if out.numel():
        _launcher(
            out.numel() // (rows * columns) * ceil_div(rows, ROWS) * ceil_div(columns, 8 * WORDS),
            (*packed.tensors, out),
            (rows, columns, packed.words),
            (packed.decoder, packed.options._replace(shuffle=shuffles(out)), ROWS, WORDS),
            warps=4,
        )
    return out


@dequantize_bitplane.kernel("cuda", "xpu", rank=2)
def bitplane(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor,
    codebook: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    matrices = max(factor.numel(), 1)
    weight = decoders.packed_kbit(packed, scales, zeros, factor, codebook, width)
    return decode(weight, (matrices, rows // matrices, width), dtype).view(rows, width)


@dequantize_hqq.kernel("cuda", "xpu")
def hqq(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    return decode(decoders.packed_hqq(packed, scales, zeros, bits, group, width), (rows, width), dtype)


@dequantize_int4.kernel("cuda", "xpu")
def int4(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    order: Tensor | None,
    zero_shift: int,
    dtype: torch.dtype,
) -> Tensor:
    shape = *scales.shape[:-2], scales.shape[-1], qweight.shape[-2] * PACK
    words = qweight.contiguous(), qzeros.contiguous(), scales.contiguous()
    group_index, order = (None if part is None else part.contiguous() for part in (group_index, order))
    return decode(decoders.packed_int4(*words, group_index, order, zero_shift), shape, dtype)
