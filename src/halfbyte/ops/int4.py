"""Affine 4-bit integers in groups, as GPTQ and AWQ checkpoints store them: the specification.

    value[n, k] = (code − zero[group(k), n]) · scale[group(k), n]

Eight codes share an int32. GPTQ packs eight neighbours of a column, lowest bits first; AWQ packs eight neighbours of a
row in the order 0, 2, 4, 6, 1, 3, 5, 7 (AutoAWQ's "gemm" version). Zeros are packed along a row, in the same order as
the codes (AWQ) or in sequence (GPTQ). The product of a 5-bit integer and a 16-bit scale is exact in fp32 and rounded
once; in fp16 this equals the multiplication of the published readers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op

PACK = 8  # codes per word
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # bit position of each of eight neighbours
SHIFTS = (0, 4, 8, 12, 16, 20, 24, 28)


def _unpack(words: Tensor, shifts: tuple[int, ...], dim: int) -> Tensor:
    """Unpack to int32 codes; `dim` of `words` grows eightfold."""
    codes = [(words >> shift) & 15 for shift in shifts]
    return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)


@op("triton.int4")
def dequantize_int4(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    awq: bool,
    zero_shift: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize a packed matrix with K inputs and N outputs.

    Args:
        qweight: int32 [K/8, N] (GPTQ) or [K, N/8] (AWQ).
        qzeros: int32 [G, N/8].
        scales: [G, N], a 16- or 32-bit float.
        group_index: int32 [K], the group of each input; None: G groups of equal length.
        awq: AWQ's order of codes.
        zero_shift: added to a stored zero, modulo 16.

    Returns:
        `dtype` [N, K], rounded once from fp32.
    """
    shifts = AWQ_SHIFTS if awq else SHIFTS
    codes = _unpack(qweight, shifts, 1 if awq else 0)
    zeros = (_unpack(qzeros, shifts, 1) + zero_shift) & 15
    factors = scales.float()
    if group_index is None:
        runs = codes.view(len(scales), -1, codes.shape[1])
        values = ((runs - zeros.unsqueeze(1)) * factors.unsqueeze(1)).view(codes.shape)
    else:
        group = group_index.long()
        values = (codes - zeros[group]) * factors[group]
    return values.t().to(dtype).contiguous()
