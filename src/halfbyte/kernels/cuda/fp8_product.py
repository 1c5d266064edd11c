"""FP8 GEMMs on NVIDIA GPUs with FP8 units, by torch._scaled_mm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.fp8_product import emulated, fp8_product
from ...utils.notices import notice
from ..device import device_of

MULTIPLE = 16  # of the sizes of an FP8 product


def obstacle(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *_: Any) -> str | None:
    needed = (9, 0) if b_scale.dim() else (8, 9)  # scales per row: Hopper and later
    if not device_of(a).at_least(needed):
        return f"{a.device.type} has no FP8 units that torch multiplies with"
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        return f"{a.shape[1]} and {b.shape[0]} are not both multiples of {MULTIPLE}, as FP8 products need"
    return None


@fp8_product.kernel("cuda", unless=obstacle, rank=1)
def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    if b_scale.dim():
        a_scale, b_scale = a_scale.expand(a.shape[0], 1).contiguous(), b_scale.view(1, -1)
    result = out if out.dtype is torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast, out=result)
    if result is not out:
        out.copy_(result)


@fp8_product.kernel("cuda", rank=2)
def emulate(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    why = obstacle(a, b, a_scale, b_scale)
    notice("fp8-product-cuda", f"{why}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out)
