"""GEMM of two NVFP4 operands on FP4 tensor cores (Blackwell: sm_100, sm_120), by torch._scaled_mm.

No Blackwell GPU has run this. Therefore the first call on a device multiplies a small example and compares it with the
reference; if they differ, dispatch logs it once and the GEMM runs in 16 bits, as on other GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...dispatch import Unavailable
from ...formats.e2m1 import pack_e2m1
from ...ops.float4 import emulated, nvfp4_product, row_scales
from ..device import device_of

BLACKWELL = (10, 0)
MULTIPLE = 32  # of the contraction and of N: 16 bytes of packed codes, and of results
SCALE_ROWS, SCALE_COLUMNS = 128, 4  # tile of scales that is contiguous in memory, stored as 32 rows of 16 bytes


def unsupported_reason(a: Tensor, b: Tensor, *_: Any) -> str | None:
    if not device_of(a).at_least(BLACKWELL):
        return "needs FP4 tensor cores (Blackwell)"
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        return f"{a.shape[1]} and {b.shape[0]} are not both multiples of {MULTIPLE}, as FP4 GEMMs need"
    return None


@nvfp4_product.kernel("cuda", unless=unsupported_reason)
def scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if not _is_right(a.device):
        raise Unavailable(f"torch._scaled_mm multiplies NVFP4 differently on {device_of(a).name}")
    return _scaled_mm(a, b, a_scales, b_scales, factor, dtype)


def _scaled_mm(a: Tensor, b: Tensor, a_scales: Tensor, b_scales: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    left = pack_e2m1(a).view(torch.float4_e2m1fn_x2)
    right = pack_e2m1(b).view(torch.float4_e2m1fn_x2).t()
    left_scales = blocked_scales(row_scales(a_scales, len(a)))
    right_scales = blocked_scales(row_scales(b_scales, len(b)))
    # fp16 overflows before the factor is applied, bf16 does not.
    sums = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    return torch._scaled_mm(left, right, left_scales, right_scales, out_dtype=sums).mul_(factor).to(dtype)


def blocked_scales(scales: Tensor) -> Tensor:
    """Return bytes of E4M3 [rows, columns] in the order of FP4 tensor cores.

    cuBLAS 12.8 documentation, section 3.1.4.3: tiles of 128×4 scales follow one another row by row; scale (r, c) of a
    tile is at (r % 32) · 16 + (r // 32) · 4 + c. Missing rows and columns are zero.

    Returns:
        float8_e4m3fn, flat.
    """
    padded = F.pad(scales, (0, -scales.shape[1] % SCALE_COLUMNS, 0, -scales.shape[0] % SCALE_ROWS))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // SCALE_COLUMNS, SCALE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().view(torch.float8_e4m3fn).flatten()


@functools.cache
def _is_right(device: torch.device) -> bool:
    """Return whether FP4 tensor cores give the reference's result for an example of several tiles of scales."""
    generator = torch.Generator().manual_seed(0)

    def random(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator, dtype=torch.uint8).to(device)

    a = random(0, 16, 160, 192)
    b = random(0, 16, 64, 192)
    a_scales = random(0x20, 0x58, 160, 12)  # from 2^-3 to 2^4
    b_scales = random(0x20, 0x58, 4, 12)
    factor = torch.ones((), device=device)
    try:
        result = _scaled_mm(a, b, a_scales, b_scales, factor, torch.float32)
    except (RuntimeError, TypeError, AttributeError):  # this build of torch has no FP4 GEMM, or another signature
        return False
    expected = emulated(a, b, a_scales, b_scales, factor, torch.float32)
    return bool((result - expected).abs().amax() <= 1e-4 * expected.abs().amax())
