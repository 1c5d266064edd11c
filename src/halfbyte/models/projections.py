"""Linear layers as the fused functions of `autograd.lora` take them: frozen weight, bias and at most one plain LoRA.

What an adapter is made of can change between calls (`set_adapter`, `disable_adapter`, `merge_adapter`), so it is read
at every call, which is some attribute look-ups. Whatever is not plain LoRA on a frozen linear runs its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..autograd.lora import LoRA, Products, lora_linear, lora_qkv
from ..dispatch import on_compiler
from ..notices import notice
from ..qat.layer import QATLinear
from .copies import copies_of


class Projection(NamedTuple):
    """A frozen linear and its adapter."""

    weight: Tensor
    bias: Tensor | None
    lora: LoRA | None
    dropout: float


def hooked(module: nn.Module) -> bool:
    """True where something watches or replaces the module's forward, which a fused function would pass by."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def read_projection(module: nn.Module) -> Projection | str:
    """What `module` computes, or in words why it must compute that itself."""
    if isinstance(module, BaseTunerLayer):
        return _read_adapted(module)
    return _read_base(module)


def _read_base(module: nn.Module, lora: LoRA | None = None, dropout: float = 0.0) -> Projection | str:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__} has a forward of its own"
    if hooked(module):
        return "it has hooks"
    if module.weight.requires_grad or (module.bias is not None and module.bias.requires_grad):
        return "its own weights are trained"
    return Projection(module.weight, module.bias, lora, dropout)


def _read_adapted(module: BaseTunerLayer) -> Projection | str:
    if not isinstance(module, LoraLinear) or type(module).forward is not LoraLinear.forward:
        if isinstance(getattr(module, "base_layer", None), QATLinear):
            return "its weight is rounded with the adapter merged"
        return f"its adapter is PEFT's {type(module).__module__.removeprefix('peft.tuners.')}.{type(module).__name__}"
    if hooked(module):
        return "it has hooks"
    if module.merged:
        return "its adapter is merged"
    active = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
    if len(active) > 1:
        return f"{len(active)} adapters are active at once"
    if not active:
        return _read_base(module.base_layer)
    name = active[0]
    if name in module.lora_variant:
        return f"its LoRA is a variant ({type(module.lora_variant[name]).__name__})"
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    if b.bias is not None:
        return "its lora_B has a bias"
    if hooked(a) or hooked(b) or not isinstance(dropout, (nn.Dropout, nn.Identity)):
        return "a part of its adapter is not PEFT's own"
    probability = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    lora = LoRA(a.weight, b.weight, module.scaling[name], copies_of(module, name))
    return _read_base(module.base_layer, lora, probability)


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


def project(x: Tensor, *modules: nn.Module, recipe: Products | None = None) -> tuple[Tensor, ...]:
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


def say_unfused(recipe: Products | None) -> None:
    """A module's own forward knows no recipe."""
    if recipe is not None and not on_compiler():
        notice("recipe-unfused", f"linears that run their own forward compute in 16 bits, not in recipe {recipe.name}")
