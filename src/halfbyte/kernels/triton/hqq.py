"""Triton: values of HQQ weights; `triton.bitplane` decodes, then scale · (code − zero).

Bound by memory: bits/8 + 4/group bytes read and, in bf16, 2 written a value. There is no table, so codes become floats
by conversion.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.hqq import dequantize_hqq
from ..tiling import ceil_div
from .bitplane import GROUPS, eight_codes, store_eight
from .launch import Launcher


@triton.jit
def _dequantize(
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


_launcher = Launcher(_dequantize, enable_fp_fusion=False)


@dequantize_hqq.kernel("cuda", "xpu")
def dequantize(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(rows, width, dtype=dtype, device=packed.device)
    eights = scales.numel() * (group // 8)
    if eights:
        _launcher(
            ceil_div(eights, GROUPS),
            (packed, scales, zeros, out),
            (eights, width),
            (bits, group, width % group != 0, GROUPS),
            warps=4,
        )
    return out
