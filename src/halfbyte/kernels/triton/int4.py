"""Triton: dequantization of GPTQ and AWQ words to a weight [N, K] in one launch.

Bound by memory: n values read n/2 bytes of codes and write 2n bytes in bf16; scales and zeros of a group stay in the
cache. Words run along the outputs, [K, N], and the result is [N, K]. A program decodes a square tile, which the
compiler transposes through shared memory before the store.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.int4 import PACK, dequantize_int4
from ..tiling import ceil_div
from .launch import Launcher

INPUTS, OUTPUTS = 64, 64  # values of a program's tile


@triton.jit
def _dequantize(
    qweight_ptr, qzeros_ptr, scales_ptr, index_ptr, out_ptr, inputs, outputs, group_size, zero_shift,
    AWQ: tl.constexpr, INDEXED: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(outputs, OUTPUTS)
    k = (tl.program_id(0) // tiles).to(tl.int64) * INPUTS + tl.arange(0, INPUTS)
    n = (tl.program_id(0) % tiles).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = (k < inputs)[:, None] & (n < outputs)[None, :]
    lane = (n % 8).to(tl.int32)
    if AWQ:  # neighbours 0, 2, 4, 6 are in the low half of the word
        lane_shift = (lane // 2 + (lane % 2) * 4) * 4
        word = k[:, None] * (outputs // 8) + (n // 8)[None, :]
        codes = tl.load(qweight_ptr + word, mask=inside, other=0) >> lane_shift[None, :]
    else:
        lane_shift = lane * 4
        word = (k // 8)[:, None] * outputs + n[None, :]
        codes = tl.load(qweight_ptr + word, mask=inside, other=0) >> ((k % 8).to(tl.int32) * 4)[:, None]
    if INDEXED:
        group = tl.load(index_ptr + k, mask=k < inputs, other=0).to(tl.int64)
    else:
        group = k // group_size
    packed_zeros = tl.load(qzeros_ptr + group[:, None] * (outputs // 8) + (n // 8)[None, :], mask=inside, other=0)
    zeros = ((packed_zeros >> lane_shift[None, :]) + zero_shift) & 15
    scales = tl.load(scales_ptr + group[:, None] * outputs + n[None, :], mask=inside, other=0.0).to(tl.float32)
    values = ((codes & 15) - zeros).to(tl.float32) * scales
    tl.store(out_ptr + n[None, :] * inputs + k[:, None], values.to(out_ptr.dtype.element_ty), mask=inside)


_dequantize_launcher = Launcher(_dequantize)


@dequantize_int4.kernel("cuda", "xpu")
def dequantize(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    awq: bool,
    zero_shift: int,
    dtype: torch.dtype,
) -> Tensor:
    groups, outputs = scales.shape
    inputs = qweight.shape[0] * (1 if awq else PACK)
    out = torch.empty(outputs, inputs, dtype=dtype, device=qweight.device)
    _dequantize_launcher(
        ceil_div(inputs, INPUTS) * ceil_div(outputs, OUTPUTS),
        (
            qweight.contiguous(),
            qzeros.contiguous(),
            scales.contiguous(),
            qzeros if group_index is None else group_index.contiguous(),
            out,
        ),
        (inputs, outputs, inputs // groups, zero_shift),
        (awq, group_index is not None, INPUTS, OUTPUTS),
        warps=4,
    )
    return out
