"""Linears without a gradient, by the faster library. For few rows, a row's sums do not depend on the other rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import Op
from ..utils.hardware import onednn_beats_mkl

LEAST = 4  # rows: with AMX oneDNN sums fewer in another order (factors of an adapter: 1 to 3 rows)
SMALL = 16**3  # multiplications up to which torch does not use oneDNN (`checksize` in aten's mkldnn/Matmul.cpp)
AMX_ROWS, AMX_COLUMNS = 32, 1536  # with AMX oneDNN splits the sums of larger inputs

WORTH = 2**16  # weights from which oneDNN is faster than MKL, although its call takes 10 µs longer


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b for x [..., K], W [N, K], of any strides; no gradient.

    The library is chosen by W alone, so a row's sums do not depend on the number of rows. oneDNN has one order of sums
    for 2 rows and more (torch 2.12 and newer; `onednn_beats_mkl` leaves out older ones).
    """
    if multiplies_by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def unviewed(product: Tensor) -> Tensor:
    """Return `product` on the same memory as a tensor that autograd does not treat as a view.

    The result of a custom Function can be changed in place only if it is not a view.
    """
    return torch.unsafe_chunk(product, 1)[0] if product._is_view() else product


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """x·Wᵀ for x [M, K], in `out` [M, N], or in a new tensor with oneDNN, which cannot write into `out`."""
    return linear(x, weight) if multiplies_by_onednn(x, weight) else torch.mm(x, weight.t(), out=out)


def multiplies_by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` uses oneDNN."""
    return x.is_cpu and x.dtype is torch.float32 and weight.numel() >= WORTH and onednn_beats_mkl()


def linear_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·Wᵀ + b for x [M, K], W [N, K], with sums that do not depend on the number of rows.

    On a CPU in 16 bits, torch sums one row, and several rows of a small matmul, in another order than oneDNN sums many.
    Here rows of zeros are added until oneDNN is used. With AMX oneDNN splits sums of 1,536 and more terms of more than
    32 rows (another CPU: of about 200), so up to 64 rows are computed by halves. Prefill uses more rows: one output of
    10,000 differs in its last bit. In float32 MKL has separate orders for 1, up to 3, and more rows; these are not
    changed.
    """
    rows, columns = x.shape
    if x.device.type != "cpu" or x.dtype is torch.float32:
        return linear(x, weight, bias)
    if columns >= AMX_COLUMNS and AMX_ROWS < rows <= 2 * AMX_ROWS:
        return torch.cat([linear_rows(part, weight, bias) for part in x.split(AMX_ROWS)])
    fewest_rows = max(LEAST, SMALL // max(weight.numel(), 1) + 1)
    if not 0 < rows < fewest_rows:
        return linear(x, weight, bias)
    return linear(F.pad(x, (0, 0, 0, fewest_rows - rows)), weight, bias)[:rows]


class PackedProduct(NamedTuple):
    """The op that multiplies few rows by a packed weight.

    Args:
        op: called with x [M, K], `arguments` and a bias.
        order: int32 [2, K]: the input that each column of the packed weight belongs to, and the column of each input;
            None: columns are in the order of inputs.
    """

    op: Op
    arguments: tuple
    order: Tensor | None = None

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.op(x if self.order is None else x.index_select(1, self.order[0]), *self.arguments, bias)


def add_term(y: Tensor, term: tuple[Tensor, Tensor] | None) -> Tensor:
    """y + u·Bᵀ, in place.

    A CPU rounds twice: torch's fused 16-bit addmm sums in another order for one row than for several.
    """
    if term is None:
        return y
    return y.add_(linear_rows(*term)) if y.device.type == "cpu" else y.addmm_(term[0], term[1].t())
