"""The recipe "nvfp4": both operands of every GEMM of a frozen linear are rounded to NVFP4.

    y  = Q(x·H) · Q(W·H)ᵀ          contraction over the inputs K
    dX = Q(dY·H) · Q(Wᵀ·H)ᵀ        contraction over the outputs N; dY rounded stochastically

H is the random Hadamard transform of 16 neighbours along the contraction. It is orthonormal, so it cancels. Activations
and gradients have a scale per 16 values of the contraction, weights one per 16×16 tile. W is frozen and gets no
gradient. Both GEMMs dequantize it from its storage format and save nothing.

The GEMMs run on Blackwell's FP4 tensor cores, elsewhere in 16 bits on the same values (`ops.float4`). The fp32 factors
are multiplied onto the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..formats.base import Weight, is_quantized
from ..formats.nvfp4 import BLOCK, ERRORS, Metric, quantize_nvfp4, rotate
from ..ops.float4 import nvfp4_product
from ..ops.fp8_scaling import Slot
from ..utils.errors import ModelError


@dataclass(frozen=True)
class Nvfp4Recipe:
    """Options of the recipe nvfp4.

    Args:
        disable_rht: leave out the random Hadamard transform.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: give weights a scale per 16 values of the contraction instead of per tile.
        enable_four_over_six: for all operands, choose between scaling each block's amax to 6 or 4 (arXiv:2512.02010).
        four_over_six_metric: error measure of that choice: "MSE", "L1" or "AbsMax".
        seed: seed of the transform's signs.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    enable_four_over_six: bool = False
    four_over_six_metric: Metric = "MSE"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.four_over_six_metric not in ERRORS:
            message = f"four_over_six_metric {self.four_over_six_metric!r} is not a metric"
            raise ModelError(message, f"use one of {', '.join(ERRORS)}")

    @property
    def metric(self) -> Metric | None:
        return self.four_over_six_metric if self.enable_four_over_six else None


class Nvfp4Gemms:
    """GEMMs of one input in NVFP4; implements `autograd.lora.GemmRecipe`."""

    name: ClassVar[str] = "nvfp4"

    def __init__(self, recipe: Nvfp4Recipe):
        self.recipe = recipe

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """None: this recipe does not cast to FP8."""

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """None: this recipe does not cast to FP8."""
        return None, None

    def outputs(self, x: Tensor, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ into `outs` [M, Nᵢ]."""
        for weight, out in zip(weights, outs, strict=True):
            out.copy_(_product(x, _values(weight), self.recipe, stochastic=False))

    def input_gradient(self, grads: Sequence[Tensor], weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K]."""
        stochastic = not self.recipe.disable_stochastic_rounding
        pairs = zip(grads, weights, strict=True)
        products = [_product(dy, _values(w).t(), self.recipe, stochastic=stochastic) for dy, w in pairs]
        return torch.stack(products).sum(0) if len(products) > 1 else products[0]


def _values(weight: Weight) -> Tensor:
    """The frozen weight's values in its own dtype."""
    return weight.dequantize() if is_quantized(weight) else weight.detach()


def _product(left: Tensor, right: Tensor, recipe: Nvfp4Recipe, *, stochastic: bool) -> Tensor:
    """left·rightᵀ in left's dtype, for left [..., C] and right [N, C], both rounded to NVFP4 along C."""
    tile_rows = 1 if recipe.disable_2d_quantization else BLOCK
    rows = left.reshape(-1, left.shape[-1])
    if not recipe.disable_rht:
        rows, right = rotate(rows, recipe.seed), rotate(right, recipe.seed)
    a = quantize_nvfp4(rows, 1, recipe.metric, stochastic=stochastic)
    b = quantize_nvfp4(right, tile_rows, recipe.metric)
    product = nvfp4_product(a.codes, b.codes, a.scales, b.scales, a.factor * b.factor, left.dtype)
    return product.view(*left.shape[:-1], len(right))
