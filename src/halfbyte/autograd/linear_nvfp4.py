"""The `nvfp4` recipe: both operands of every product of a frozen linear are rounded to NVFP4 first.

    y  = Q(x·H) · Q(W·H)ᵀ          contraction over the inputs K
    dX = Q(dY·H) · Q(Wᵀ·H)ᵀ        contraction over the outputs N; dY rounded stochastically

H is the random Hadamard transform of 16 neighbours along the contraction; orthonormal, so it cancels. Activations and
gradients have a scale per 16 values of the contraction, weights one per 16×16 tile. W is frozen: it has no gradient.
It is dequantized from whatever format stores it, for both products, and nothing of it is kept.

No FP4 units are used. A code times its E4M3 scale has six significant bits, so both operands are exact in bf16 and
fp16, and the product is a 16-bit one over the same numbers; the fp32 factors are multiplied onto its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.e2m1 import codebook_e2m1, decode_scales
from ..ops.fp8_scaling import Slot
from ..ops.nvfp4 import BLOCK, ERRORS, Metric, quantize_nvfp4, rotate
from ..utils.errors import ModelError
from ..utils.notices import notice

if TYPE_CHECKING:
    from ..tensor import QuantizedTensor
    from .lora import Weight

DOWN = 2.0**-12  # operands are stored times this, so that sums of products stay inside fp16's range; exact


@dataclass(frozen=True)
class Nvfp4Recipe:
    """The recipe nvfp4: what is rounded how.

    Args:
        disable_rht: leave out the random Hadamard transform.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: give weights a scale per 16 values of the contraction instead of per tile.
        enable_four_over_six: try each block with its amax at 4 too (arXiv:2512.02010), all operands.
        four_over_six_metric: the error that decides, "MSE", "L1" or "AbsMax".
        seed: of the transform's signs.
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


def _say_emulated() -> None:
    notice(
        "nvfp4-emulated", "recipe nvfp4: operands are rounded to NVFP4 and multiplied in 16 bits; no FP4 units are used"
    )


class Nvfp4Products:
    """The products of one input in NVFP4; `autograd.lora.Products` says what for.

    Args:
        recipe: what is rounded how.
    """

    name: ClassVar[str] = "nvfp4"

    def __init__(self, recipe: Nvfp4Recipe):
        self.recipe = recipe

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """Nothing is cast to FP8."""

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """Likewise."""
        return None, None

    def products(self, x: Tensor, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ into `outs` [M, Nᵢ]."""
        _say_emulated()
        for weight, out in zip(weights, outs, strict=True):
            out.copy_(_product(x, _values(weight), self.recipe, stochastic=False))

    def input_gradient(self, grads: Sequence[Tensor], weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K]."""
        stochastic = not self.recipe.disable_stochastic_rounding
        pairs = zip(grads, weights, strict=True)
        products = [_product(dy, _values(w).t(), self.recipe, stochastic=stochastic) for dy, w in pairs]
        return torch.stack(products).sum(0) if len(products) > 1 else products[0]


def _values(weight: QuantizedTensor | Tensor) -> Tensor:
    """The frozen weight's values in its own dtype. QuantizedTensor's module stands above this one."""
    return weight.dequantize() if hasattr(weight, "format") else weight.detach()


def _product(left: Tensor, right: Tensor, recipe: Nvfp4Recipe, *, stochastic: bool) -> Tensor:
    """left [..., C] times rightᵀ, right [N, C], both rounded to NVFP4 along C; `dtype` of left."""
    tile_rows = 1 if recipe.disable_2d_quantization else BLOCK
    rows, left_factor = _rounded(left.reshape(-1, left.shape[-1]), 1, recipe, left.dtype, stochastic=stochastic)
    columns, right_factor = _rounded(right, tile_rows, recipe, left.dtype, stochastic=False)
    product = F.linear(rows, columns).mul_(left_factor * right_factor)
    return product.view(*left.shape[:-1], right.shape[0])


def _rounded(
    values: Tensor, tile_rows: int, recipe: Nvfp4Recipe, dtype: torch.dtype, *, stochastic: bool
) -> tuple[Tensor, Tensor]:
    """Codes times E4M3 scales times 2^-12, `dtype` [rows, padded]; and the fp32 factor that is still to be applied."""
    if not recipe.disable_rht:
        values = rotate(values, recipe.seed)
    codes, scales, factor = quantize_nvfp4(values, tile_rows, recipe.metric, stochastic=stochastic)
    step = decode_scales(scales, torch.full((), DOWN, device=scales.device))
    if tile_rows > 1:
        step = step.repeat_interleave(tile_rows, dim=0)[: codes.shape[0]]
    numbers = codebook_e2m1(codes.device)[codes.int()].view(*step.shape, BLOCK) * step.unsqueeze(2)
    return numbers.view(codes.shape).to(dtype), factor / DOWN
