"""`F.linear` of a few rows, where a row's sums are the same whatever the rows beside it are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 4  # rows: oneDNN sums fewer in another order where there is AMX (factors of an adapter: 1 to 3 rows)
SMALL = 16**3  # multiplications up to which torch leaves oneDNN out (`checksize` in aten's mkldnn/Matmul.cpp)


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b for x [M, K], W [N, K].

    On a CPU in 16 bits torch sums one row, and several of a small product, in another order than oneDNN sums many:
    there rows of zeros are added until oneDNN computes it, as it does many. (With AMX it splits sums of 1,536 and more
    products from some 200 rows on, where prompts are read: one output of 10,000 differs in its last bit.) In float32
    MKL has an order each for 1, up to 3, and more rows; that is left as it is.
    """
    rows = len(x)
    least = max(LEAST, SMALL // max(weight.numel(), 1) + 1)
    if x.device.type != "cpu" or x.dtype is torch.float32 or not 0 < rows < least:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, least - rows)), weight, bias)[:rows]
