"""Linears of one input, computed by the fused functions of `autograd.lora` where each is plain, else one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..autograd.lora import GemmRecipe, LoRA, lora_linear, lora_qkv
from ..dispatch import on_compiler
from ..layers.plain import hooked, read_linear
from ..utils.notices import notice
from .cast_cache import copies_of


class Projection(NamedTuple):
    """A frozen linear and its adapter."""

    weight: Tensor
    bias: Tensor | None
    lora: LoRA | None
    dropout: float


def read_projection(module: nn.Module) -> Projection | str:
    """What `module` computes, or in words why it must compute that itself."""
    read = read_linear(module)
    if isinstance(read, str):
        return read
    (weight, bias), adapters = (read.base.weight, read.base.bias), read.adapters
    if len(adapters) > 1:
        return f"{len(adapters)} adapters are active at once"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its own weights are trained"
    if not adapters:
        return Projection(weight, bias, None, 0.0)
    name, a, b, scaling, dropout = adapters[0]
    return Projection(weight, bias, LoRA(a, b, scaling, copies_of(module, name)), dropout)


def read_together(modules: Sequence[nn.Module]) -> list[Projection] | None:
    """The projections of several linears that one function may compute, or None; says once what stands in the way."""
    plain = []
    for module in modules:
        read = read_projection(module)
        if isinstance(read, str):
            if not on_compiler():
                notice(f"unfused: {read}", f"a {type(module).__name__} runs its own forward: {read}")
            return None
        plain.append(read)
    dropouts = {projection.dropout for projection in plain if projection.lora is not None}
    return plain if len(dropouts) == 1 else None  # none where no adapter is there to fuse


def dropout_of(projections: Sequence[Projection]) -> float:
    """The dropout that all adapters among `projections` share."""
    return max(projection.dropout for projection in projections)


def project(x: Tensor, *modules: nn.Module, recipe: GemmRecipe | None = None) -> tuple[Tensor, ...]:
    """The linears `modules` of one input x [..., K], each [..., N]: fused where each is plain, else one by one.

    `recipe` is what fused products are computed in.
    """
    read = read_together(modules)
    if read is None:
        say_unfused(recipe)
        # Hooks may keep what they see, and RoPE and GLU work in place on what comes from here.
        return tuple(module(x).clone() if hooked(module) else module(x) for module in modules)
    if len(read) == 1:
        return (lora_linear(x, *read[0], recipe),)
    weights, biases, loras, _ = zip(*read, strict=True)
    return lora_qkv(x, weights, biases, loras, dropout_of(read), recipe)


def say_unfused(recipe: GemmRecipe | None) -> None:
    """A module's own forward knows no recipe."""
    if recipe is not None and not on_compiler():
        notice("recipe-unfused", f"linears that run their own forward compute in 16 bits, not in recipe {recipe.name}")
