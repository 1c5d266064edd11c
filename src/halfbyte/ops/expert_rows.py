"""A mixture's experts for the few tokens of a generation's step, without adapters: what their products read decides."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import op
from .experts import StackedWeight, combine, grouped_product, route
from .experts_unit import Unit, expert_unit


@op("cuda.expert_rows4")
def expert_rows(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor
) -> Tensor:
    """Σ_j w_tj·unit(x_t·W₁ᵀ)·W₂ᵀ over the experts that token t goes to.

    Args:
        x: [T, K] float.
        first: of E experts [2I, K], gate and up.
        second: of E experts [H, I].
        index: integers [T, k], below E.
        routed: float [T, k], the weights w.

    Returns:
        [T, H] in x's dtype.
    """
    routing = route(index, first.shape[0])
    hidden = expert_unit(grouped_product(x, first, routing, True), unit)
    return combine(grouped_product(hidden, second, routing), routing, routed)
