"""An adapter's first product in generation, for the rows of a batch: the specification."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import op
from .rows import linear_rows


def add_term(y: Tensor, term: tuple[Tensor, Tensor] | None) -> Tensor:
    """y + u·Bᵀ, in place.

    On a CPU in two roundings: in 16 bits torch's one sums otherwise for one row than for several.
    """
    if term is None:
        return y
    return y.add_(linear_rows(*term)) if y.device.type == "cpu" else y.addmm_(term[0], term[1].t())


@op("cuda.low_rank")
def low_rank_rows(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """u = x·Aᵀ, where rows of x may leave out rows of A.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        a: [R, K] in x's dtype.
        mask: [M, R] of zeros and ones in x's dtype, or None.

    Returns:
        [M, R] in x's dtype.
    """
    u = linear_rows(x, a)
    return u if mask is None else u * mask
