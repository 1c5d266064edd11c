"""C: values of HQQ weights, by the code of `native.bitplane` without a codebook."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.hqq import dequantize_hqq
from .bitplane import decode


@dequantize_hqq.kernel("cpu")
def dequantize(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    return decode(packed, bits, None, scales.float(), zeros.float(), rows, width, dtype)
