"""The end of a gradient that is a sum over all rows: kernels leave a few rows of partial sums, which are added here."""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op


@op("triton.partial_sums")
def sum_rows(partials: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """The sum of the rows of partials, fp32 [R, D], as [1, D] in `dtype`.

    With `first`, [2, D]: the sum of so many rows, and that of the others.
    """
    parts = [partials] if first is None else [partials[:first], partials[first:]]
    return torch.stack([part.sum(0) for part in parts]).to(dtype)
