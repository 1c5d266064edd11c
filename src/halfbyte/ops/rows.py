"""`F.linear` without a gradient: by the library that is faster, and of few rows with each row's sums the same whatever
the rows beside it are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.hardware import onednn_beats_mkl

LEAST = 4  # rows: oneDNN sums fewer in another order where there is AMX (factors of an adapter: 1 to 3 rows)
SMALL = 16**3  # multiplications up to which torch leaves oneDNN out (`checksize` in aten's mkldnn/Matmul.cpp)

WORTH = 2**16  # weights from which on oneDNN's call, 10 µs dearer than MKL's, pays


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b for x [..., K], W [N, K], of any strides; where nothing is to be differentiated.

    Which library multiplies is decided by W alone, so that a row's sums do not depend on how many rows there are.
    oneDNN has one order of sums for 2 rows and more.
    """
    if multiplies_by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def unviewed(product: Tensor) -> Tensor:
    """`product` as a tensor that autograd takes for no view, on the same memory.

    What a custom Function returns can be changed in place only if it is no view.
    """
    return torch.unsafe_chunk(product, 1)[0] if product._is_view() else product


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The same of x [M, K], in `out` [M, N] or, since oneDNN has no such argument, in a new tensor."""
    return linear(x, weight) if multiplies_by_onednn(x, weight) else torch.mm(x, weight.t(), out=out)


def multiplies_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` has oneDNN multiply."""
    return x.is_cpu and x.dtype is torch.float32 and weight.numel() >= WORTH and onednn_beats_mkl()


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
        return linear(x, weight, bias)
    return linear(F.pad(x, (0, 0, 0, least - rows)), weight, bias)[:rows]
