"""The unit between an expert's two products, over rows c [S, 2I] that hold gate and up, forward and backward.

    g = min(gate, limit)      u = clamp(up, −limit, limit)      h = a(g)·(u + offset)

with a of `ops.glu`, where silu is g·σ(α·g): SwiGLU and GeGLU have α = 1, no limit and offset 0; gpt-oss has α = 1.702,
a limit of 7 and offset 1 (its model card, arXiv:2508.10925, §2.1). As with torch's clamp, a value at its limit has a
gradient, one beyond it none.

Backward is given z = ∂L/∂y·W of the second product before the routing weight w is multiplied, so that for each row

    ∂L/∂w = ⟨z, h⟩      dh = w·z      dgate, dup in the places of gate and up      h in the place of z

and the second product's result need not be kept for the gradient of w (SonicMoE, arXiv:2512.14080, §3).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .glu import ACTIVATIONS, Activation, activation_and_derivative, glu


class Unit(NamedTuple):
    """How h comes from c.

    Args:
        activation: as in `ops.glu.glu`.
        interleaved: gate and up take turns in c; else gate comes first.
        limit, alpha, offset: of the module's formulas; alpha is 1 unless the activation is silu.
    """

    activation: Activation
    interleaved: bool = False
    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is a unit of `ops.glu`."""
        return (self.limit, self.alpha, self.offset) == (math.inf, 1.0, 0.0)

    def halves(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up [S, I], views of c."""
        if self.interleaved:
            return c[:, 0::2], c[:, 1::2]
        gate, up = c.chunk(2, dim=1)
        return gate, up


def check_unit(c: Tensor, unit: Unit) -> None:
    """Raise a ModelError where no kernel could follow."""
    if c.dim() != 2 or c.shape[1] % 2 or not c.is_contiguous():
        raise ModelError(f"experts: gate and up are {list(c.shape)}", "pass contiguous rows of both")
    if unit.activation not in ACTIVATIONS:
        raise ModelError(f"experts: activation is {unit.activation!r}", f"use one of {', '.join(ACTIVATIONS)}")


def _activated(c: Tensor, unit: Unit) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gate, up, a(g), a′(g) and u + offset, in fp32 (fp64 for fp64)."""
    gate, up = (half.to(torch.promote_types(c.dtype, torch.float32)) for half in unit.halves(c))
    if unit.plain:
        return gate, up, *activation_and_derivative(gate, unit.activation), up
    activated, derivative = activation_and_derivative(gate.clamp(max=unit.limit) * unit.alpha, unit.activation)
    return gate, up, activated / unit.alpha, derivative, up.clamp(-unit.limit, unit.limit) + unit.offset


@op("triton.experts_unit", "native.glu")
def expert_unit(c: Tensor, unit: Unit) -> Tensor:
    """h [S, I] of c [S, 2I], in its dtype."""
    check_unit(c, unit)
    if unit.plain:
        return glu(*unit.halves(c), unit.activation)
    _, _, activated, _, up = _activated(c, unit)
    return (activated * up).to(c.dtype)


@op("triton.experts_unit", "native.glu")
def expert_unit_backward_(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> Tensor:
    """The gradients of the module's formulas: c becomes its own, z becomes h.

    Args:
        z: [S, I] sorted rows, in the dtype of c.
        c: [S, 2I], what the forward read.
        weights: fp32 [S], of slots.
        order: int32 [S], the slot of each row.

    Returns:
        fp32 [S]: ∂L/∂w of each slot.
    """
    check_unit(c, unit)
    gate, up, activated, derivative, shifted = _activated(c, unit)
    exact, hidden = z.to(gate.dtype), activated * shifted
    dh = exact * weights[order].to(gate.dtype)[:, None]
    d_gate, d_up = dh * shifted * derivative, dh * activated
    if not unit.plain:
        d_gate, d_up = d_gate * (gate <= unit.limit), d_up * (up.abs() <= unit.limit)
    for half, found in zip(unit.halves(c), (d_gate, d_up), strict=True):
        half.copy_(found)
    rounded = hidden.to(z.dtype)
    products = (exact * rounded).sum(1).to(weights.dtype)
    z.copy_(rounded)
    return torch.empty_like(weights).index_copy_(0, order.long(), products)
