"""NF4 and FP4 weights as E4M3 codes with one scale: what an FP8 product takes of a weight stored in 4 bits.

The scale follows from the weight's largest magnitude, which never changes: no pass looks for it. A weight costs half a
byte read and one written, against 2.5 bytes for values in 16 bits that would then have to be cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .blockwise4 import dequantize_blockwise4
from .float8 import E4M3, to_float8


@op("cuda.float8", "triton.blockwise4_float8")
def float8_of_blockwise4(
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
    """E4M3 of values · factor, rounded once from fp32.

    Args:
        packed, absmax, nested, blocksize, quant_type: as in `dequantize_blockwise4`.
        shape: (N, K) of the weight; K is a multiple of 8, so that a row begins with a word of codes.
        factor: fp32 [], the inverse of the scale.
        transposed: write [K, N], for products that sum over N.
        out: where to write; columns are adjacent, rows may be further apart. None: a new tensor.

    Returns:
        float8_e4m3fn [N, K], or [K, N].
    """
    rows, width = shape
    values = dequantize_blockwise4.reference(packed, absmax, nested, blocksize, quant_type, rows * width, torch.float32)
    codes = to_float8(values.view(shape) * factor, E4M3)
    codes = codes.view(torch.uint8).t().contiguous().view(E4M3) if transposed else codes
    if out is None:
        return codes
    out.view(torch.uint8).copy_(codes.view(torch.uint8))
    return out
