"""Projections with frozen weights: fused with their LoRA adapters, and computed in a recipe.

A recipe is the precision of GEMMs with frozen weights, independent of their storage format:

    bf16        x's dtype (16 or 32 bits), with dequantized weights
    fp8-hybrid  `autograd.linear_fp8`: E4M3 forward, E5M2 for gradients, delayed scaling
    nvfp4       `autograd.linear_nvfp4`: both operands rounded to NVFP4

Adapters, norms, attention and the head stay in 16 bits. The `PatchRecord` of a patched attention or MLP holds the
functions for its two GEMMs (q, k, v or gate, up; and o or down): one pair for training, which records maxima in the
scaling history, and one for evaluation, which does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..autograd.dora import Scale
from ..autograd.gemms import dense
from ..autograd.linear_fp8 import Fp8Gemms
from ..autograd.linear_nvfp4 import Nvfp4Gemms, Nvfp4Recipe
from ..autograd.lora import GemmRecipe, LoRA, OutputUse, RowLoRA, lora_linear, lora_qkv
from ..config import Precision
from ..dispatch import autocast_dtype, on_compiler
from ..formats.float8 import E4M3, E5M2
from ..layers.plain import equals_its_class, hooked, read_linear
from ..ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from ..utils.errors import ConfigError, ModelError
from ..utils.notices import notice
from .cast_cache import cast_factors
from .patch_record import active_row_modules, existing_record, mark_read, record

RECIPE_NAMES = ("bf16", "fp8-hybrid", "nvfp4")
STEP_NORMS = "step_norms"  # attribute of PEFT's DoRA layers during an optimizer step, see `modeling.step_norms`
FP8_CAPABILITY = (8, 9)  # minimum compute capability

Recipe = ScalingOptions | Nvfp4Recipe | None


class Projection(NamedTuple):
    """A frozen linear and its adapter."""

    weight: Tensor
    bias: Tensor | None
    lora: LoRA | RowLoRA | None
    dropout: float


def read_projection(module: nn.Module) -> Projection | str:
    """Return the projection that `module` computes, or the reason why it cannot be fused.

    In a joint forward of several adapters (`row_adapters`) it has the adapters of the ranges of rows.
    """
    if adapted := active_row_modules(module):
        return _read_rows(module, adapted)
    read = read_linear(module, with_dora=True, with_bias=True)
    if isinstance(read, str):
        return read
    weight, bias = read.weight, read.bias
    if len(read.adapters) > 1:
        return f"{len(read.adapters)} adapters are active at once"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its own weights are trained"
    if not read.adapters:
        return Projection(weight, bias, None, 0.0)
    name, a, b, scaling, dropout, dora, lora_bias, first_column = read.adapters[0]
    if lora_bias is not None:
        bias = scaling * lora_bias if bias is None else bias + scaling * lora_bias
    if dora is None:
        lora = LoRA(a, b, scaling, cast_factors(module, name), first_column=first_column)
    else:
        lora = dora_adapter(a, b, scaling, dora, weight, cast_factors(module, name), first_column)
    return Projection(weight, bias, lora, dropout)


def _read_rows(module: Any, adapted: Sequence[nn.Module]) -> Projection | str:
    """Return the projection of a frozen linear with the adapters of `adapted`, for equal ranges of rows."""
    base = read_linear(module)
    if isinstance(base, str):
        return base
    loras = []
    for layer in adapted:
        read = read_projection(layer)
        if isinstance(read, str):
            return read
        if not isinstance(read.lora, LoRA) or read.lora.magnitude is not None:
            return "some of the adapters are not plain LoRA of this linear"
        if read.bias is not base.bias:
            return "some of the adapters have a bias"
        loras.append(read.lora)
        if read.dropout:
            return "the adapters have dropout"
    mark_read(module)
    return Projection(base.weight, base.bias, RowLoRA(tuple(loras)), 0.0)


def dora_adapter(
    a: Tensor,
    b: Tensor,
    scaling: float,
    dora: Any,
    weight: Tensor,
    copies: tuple[Tensor, Tensor] | None = None,
    first_column: int = 0,
) -> LoRA:
    """Return the adapter of a linear with DoRA, with the norms of this optimizer step if they have been computed.

    Args:
        dora: PEFT's layer with the magnitude.
        weight: [N, K] of the linear.
        copies, first_column: as in `LoRA`.
    """
    norms = vars(dora).get(STEP_NORMS)
    return LoRA(a, b, scaling, copies, dora.weight, squared_norms(dora, weight), norms, first_column)


def squared_norms(dora: Any, weight: Tensor) -> Tensor:
    """Return ‖W‖² of the rows of a frozen weight, fp32 [N] or fp64, computed once and kept at PEFT's DoRA layer."""
    squares = vars(dora).get("squared_norms")
    if squares is None or squares.device != weight.device:
        exact = torch.promote_types(weight.dtype, torch.float32)
        squares = torch.linalg.vector_norm(dense(weight, weight.dtype), dim=1, dtype=exact).square()
        dora.squared_norms = squares
    return squares


def read_projections(modules: Sequence[nn.Module]) -> list[Projection] | None:
    """Return the projections of linears that one function can compute, or None; an obstacle is logged once."""
    plain = []
    for module in modules:
        read = read_projection(module)
        if isinstance(read, str):
            _check_no_rows(modules, read)
            if not on_compiler():
                notice(f"unfused: {read}", f"a {type(module).__name__} runs its own forward: {read}")
            return None
        plain.append(read)
    dropouts = {projection.dropout for projection in plain if projection.lora is not None}
    if len(dropouts) > 1:
        _check_no_rows(modules, "they have several dropouts")
    return plain if len(dropouts) == 1 else None  # without adapters there is nothing to fuse


def _check_no_rows(modules: Sequence[nn.Module], reason: str) -> None:
    """Raise a ModelError in a joint forward of several adapters, which the modules' own forwards would leave out."""
    if any(map(active_row_modules, modules)):
        raise ModelError(f"one forward cannot compute several adapters: {reason}", "train each in a run of its own")


def shared_dropout(projections: Sequence[Projection]) -> float:
    """Return the dropout that all adapters of `projections` share."""
    return max(projection.dropout for projection in projections)


def project(
    x: Tensor, *modules: nn.Module, recipe: GemmRecipe | None = None, use: OutputUse = "overwritten"
) -> tuple[Tensor, ...]:
    """Apply the linears `modules` to x [..., K], each to [..., N]: in one fused function if possible.

    Args:
        recipe: computes the GEMMs of fused projections.
        use: what the caller does with the outputs.
    """
    return _project(x, modules, read_projections(modules), recipe, [use] * len(modules))


def project_rotated(
    x: Tensor, *modules: nn.Module, recipe: GemmRecipe | None = None
) -> tuple[tuple[Tensor, ...], list[Scale | None]]:
    """Project as `project` does, and return DoRA's scales of the first two outputs, q and k.

    The caller passes q, k and their scales to `rope`, and does not write to the other outputs.
    """
    read = read_projections(modules)
    scales: list[Scale | None] = [None, None]
    if read is not None and not on_compiler():
        scales = [_scale(projection, x.dtype) for projection in read[:2]]
    uses: list[OutputUse] = ["unchanged" if scale is None else "deferred" for scale in scales]
    uses += ["unchanged"] * (len(modules) - 2)
    return _project(x, modules, read, recipe, uses), scales


def project_output(
    x: Tensor, module: nn.Module, recipe: GemmRecipe | None = None, scales: list[Scale] | None = None
) -> Tensor:
    """Project by one linear as `project` does; the caller does not overwrite the output.

    Args:
        scales: receives DoRA's scale, if there is one: the caller passes it to `autograd.dora.join`. None: it does not.
    """
    read = read_projections([module])
    use: OutputUse = "unchanged" if scales is None or read is None else defer(read[0], x.dtype, scales)
    return _project(x, [module], read, recipe, [use])[0]


@equals_its_class
def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run PEFT's LoRA around a linear as `project` does; for linears whose callers call them one by one."""
    read = None if args or kwargs else read_projections([self])
    if read is None:
        output: Tensor = type(self).forward(self, x, *args, **kwargs)
        return output
    return _project(x, [self], read, None, ["overwritten"])[0]


def defer(projection: Projection, dtype: torch.dtype, scales: list[Scale]) -> OutputUse:
    """Append DoRA's scale of a projection with outputs in `dtype` to `scales`; return the use of its output."""
    scale = _scale(projection, dtype)
    scales += [] if scale is None else [scale]
    return "unchanged" if scale is None else "deferred"


def _scale(projection: Projection, dtype: torch.dtype) -> Scale | None:
    """Return DoRA's scale of a projection with outputs in `dtype`; None without DoRA, or with dropout."""
    lora, bias = projection.lora, projection.bias
    if lora is None or lora.magnitude is None or projection.dropout:
        return None
    return Scale(lora.magnitude, None if bias is None else bias.to(dtype))


def _project(
    x: Tensor,
    modules: Sequence[nn.Module],
    read: list[Projection] | None,
    recipe: GemmRecipe | None,
    uses: Sequence[OutputUse],
) -> tuple[Tensor, ...]:
    if read is None:
        notify_unfused_recipe(recipe)
        # Hooks may keep references to outputs, and RoPE and GLU modify them in place.
        return tuple(module(x).clone() if hooked(module) else module(x) for module in modules)
    gemm_input = x.to(gemm_dtype(x, modules))
    if len(read) == 1:
        outputs: tuple[Tensor, ...] = (lora_linear(gemm_input, *read[0], recipe, uses[0]),)
    else:
        weights, biases, loras, _ = zip(*read, strict=True)
        outputs = lora_qkv(gemm_input, weights, biases, loras, shared_dropout(read), recipe, uses)
    return outputs if gemm_input is x else tuple(output.to(x.dtype) for output in outputs)


def gemm_dtype(x: Tensor, modules: Sequence[nn.Module]) -> torch.dtype:
    """Return the dtype in which fused GEMMs take x: its own.

    Outside autocast, fp32 inputs of bitsandbytes' linears with a `compute_dtype` of 16 bits take that dtype, as in
    these linears' own forward; results are returned in fp32.
    """
    if x.dtype is not torch.float32 or autocast_dtype(x.device.type) is not None:
        return x.dtype
    bases: list[Any] = [module.get_base_layer() if isinstance(module, BaseTunerLayer) else module for module in modules]
    chosen = {getattr(base, "compute_dtype", None) for base in bases}
    return chosen.pop() if chosen in ({torch.float16}, {torch.bfloat16}) else x.dtype


def notify_unfused_recipe(recipe: GemmRecipe | None) -> None:
    """Log once that unfused linears ignore the recipe."""
    if recipe is not None and not on_compiler():
        notice("recipe-unfused", f"linears that run their own forward compute in 16 bits, not in recipe {recipe.name}")


# --- recipes ---------------------------------------------------------------------------------------------------------


def recipe_by_name(recipe: str | Recipe) -> Recipe:
    """Return a recipe's options, the default ones for a recipe given by name; None for bf16.

    Raises:
        ModelError: unknown recipe.
    """
    if not isinstance(recipe, str):
        return recipe
    if recipe not in RECIPE_NAMES:
        raise ModelError(f"unknown recipe {recipe!r}", f"use one of {', '.join(RECIPE_NAMES)}")
    return {"bf16": None, "fp8-hybrid": ScalingOptions(), "nvfp4": Nvfp4Recipe()}[recipe]


def configured_recipe(precision: Precision) -> Recipe:
    """Return the recipe of a run's config."""
    options_class = {"fp8-hybrid": ScalingOptions, "nvfp4": Nvfp4Recipe}.get(precision.recipe)
    return options_class(**precision.recipe_options) if options_class else None


def check_recipe(recipe: Recipe, device: torch.device) -> None:
    """Check that `device` supports the recipe; a CPU emulates it in 16 or 32 bits, slowly and with a notice.

    Raises:
        ConfigError: a GPU without FP8 units.
    """
    if not isinstance(recipe, ScalingOptions) or device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip:
        raise ConfigError(f"recipe: fp8-hybrid does not run on {device.type} devices here", "set recipe: bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        name = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
        raise ConfigError(f"recipe: fp8-hybrid needs FP8 units, and {name} has none", "set recipe: bf16")


def set_recipe(modules: Sequence[nn.Module], recipe: Recipe, device: torch.device) -> DelayedScaling | None:
    """Set the recipe of each attention and MLP in `modules`; returns the scaling state to roll after each step, if any.

    Raises:
        ConfigError: the device does not support the recipe.
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


def scaling_indices(modules: Iterable[nn.Module]) -> list[int]:
    """Return the indices of the modules' tensors in the scaling state of `set_recipe`."""
    records = [patched for module in modules if (patched := existing_record(module)) and patched.products]
    recipes = [gemms for patched in records for gemms in patched.products[True] if isinstance(gemms, Fp8Gemms)]
    return [slot.index for gemms in recipes for slot in (gemms.x, gemms.grad)]


def recipe_products(module: nn.Module) -> tuple[GemmRecipe | None, GemmRecipe | None]:
    """Return the recipe's functions for both GEMMs of an attention or MLP in its current mode; None: x's dtype."""
    patched = existing_record(module)
    return (None, None) if patched is None else patched.products.get(module.training, (None, None))
