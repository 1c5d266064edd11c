"""Recipes: what the products with frozen weights are computed in, whatever format stores them.

    bf16        x's dtype (16 or 32 bits), of dequantized weights
    fp8-hybrid  `autograd.linear_fp8`: E4M3 forward, E5M2 for gradients, delayed scaling
    nvfp4       `autograd.linear_nvfp4`: both operands rounded to NVFP4

Adapters, norms, attention and the head stay in 16 bits. What computes the two products of a patched attention or MLP
(q, k, v or gate, up; and o or down) stands in its record (`patched`): once for training, which leaves its amaxes in the
histories, and once for evaluation, which leaves no traces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..autograd.linear_fp8 import Fp8Gemms
from ..autograd.linear_nvfp4 import Nvfp4Gemms, Nvfp4Recipe
from ..autograd.lora import GemmRecipe
from ..config import Precision
from ..ops.float8 import E4M3, E5M2
from ..ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from ..utils.errors import ConfigError, ModelError
from .patch_record import patched, record

NAMES = ("bf16", "fp8-hybrid", "nvfp4")
FP8_UNITS = (8, 9)  # compute capability

Recipe = ScalingOptions | Nvfp4Recipe | None


def named_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe's options, for one given by name those it has by default; None for bf16.

    Raises:
        ModelError: no such recipe.
    """
    if not isinstance(recipe, str):
        return recipe
    if recipe not in NAMES:
        raise ModelError(f"there is no recipe {recipe!r}", f"use one of {', '.join(NAMES)}")
    return {"bf16": None, "fp8-hybrid": ScalingOptions(), "nvfp4": Nvfp4Recipe()}[recipe]


def configured_recipe(precision: Precision) -> Recipe:
    """What a run's keys say."""
    made = {"fp8-hybrid": ScalingOptions, "nvfp4": Nvfp4Recipe}.get(precision.recipe)
    return made(**precision.recipe_options) if made else None


def check_recipe(recipe: Recipe, device: torch.device) -> None:
    """Whether `device` computes in it; a CPU does, in 16 or 32 bits and slowly, with a notice.

    Raises:
        ConfigError: a GPU without FP8 units.
    """
    if not isinstance(recipe, ScalingOptions) or device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip:
        raise ConfigError(f"recipe: fp8-hybrid does not run on {device.type} devices here", "set recipe: bf16")
    found = torch.cuda.get_device_capability(device)
    if found < FP8_UNITS:
        name = f"{torch.cuda.get_device_name(device)} (compute capability {found[0]}.{found[1]})"
        raise ConfigError(f"recipe: fp8-hybrid needs FP8 units, and {name} has none", "set recipe: bf16")


def set_recipe(modules: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> DelayedScaling | None:
    """Give each attention and MLP in `modules` its part of `recipe`; returns the state that steps roll, if any.

    Raises:
        ConfigError: as `check_recipe`.
    """
    check_recipe(recipe, device)
    for module in modules:
        record(module).products = {}
    if isinstance(recipe, Nvfp4Recipe):
        for module in modules:
            products = Nvfp4Gemms(recipe)
            record(module).products = dict.fromkeys((True, False), (products, products))
    if not isinstance(recipe, ScalingOptions):
        return None
    scaling = DelayedScaling([E4M3, E5M2] * 2 * len(modules), recipe, device=device)
    for at, module in enumerate(modules):
        for training in (True, False):
            slots = [Slot(scaling, index, training) for index in range(4 * at, 4 * at + 4)]
            record(module).products[training] = Fp8Gemms(*slots[:2]), Fp8Gemms(*slots[2:])
    return scaling


def scaled_rows(modules: Iterable[nn.Module]) -> list[int]:
    """Which tensors of the state that `set_recipe` gave are those of `modules`, in their order."""
    products = [found.products[True] for module in modules if (found := patched(module)) and found.products]
    both = [each for pair in products for each in pair if isinstance(each, Fp8Gemms)]
    return [slot.index for each in both for slot in (each.x, each.grad)]


def recipes_of(module: nn.Module) -> tuple[GemmRecipe | None, GemmRecipe | None]:
    """What computes the first and the second product of an attention or MLP now; None: x's dtype."""
    found = patched(module)
    return (None, None) if found is None else found.products.get(module.training, (None, None))
