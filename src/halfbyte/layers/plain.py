"""Whether a linear is what it looks like: x·Wᵀ + b, with plain LoRA around it or not.

Whoever computes a linear past its own forward asks here: training's fused functions, generation, quantization-aware
training. What an adapter is made of can change between calls (`set_adapter`, `disable_adapter`, `merge_adapter`), so it
is read at every call, which is some attribute look-ups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .frozen import FrozenLinear

FORWARDS = (nn.Linear.forward, FrozenLinear.forward)  # that compute x·Wᵀ + b


class Adapter(NamedTuple):
    """Plain LoRA: scaling · (dropped x · Aᵀ) · Bᵀ.

    Attributes:
        a: [r, K].
        b: [N, r].
        dropout: probability of dropping an input; 0 in evaluation.
    """

    name: str
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float


class PlainLinear(NamedTuple):
    """x·Wᵀ + b of `base`, and the terms of the adapters that were asked for."""

    base: nn.Linear
    adapters: list[Adapter]


def read_linear(module: nn.Module, names: Iterable[str] | None = None) -> PlainLinear | str:
    """What `module` computes, or in words why it must compute that itself.

    Args:
        module: a linear, or PEFT's LoRA around one; a class of the latter may say in `own_forward` why it has one.
        names: the adapters that count, where it has them; None: those that are active.
    """
    base = module
    adapters: list[Adapter] = []
    if isinstance(module, BaseTunerLayer):
        if not isinstance(module, LoraLinear) or type(module).forward is not LoraLinear.forward:
            return getattr(type(module), "own_forward", _own_forward(module))
        found = read_adapters(module, names)
        if isinstance(found, str):
            return found
        a, b = module.lora_A, module.lora_B
        if hooked(module) or any(hooked(a[each.name]) or hooked(b[each.name]) for each in found):
            return "it has hooks"
        base, adapters = module.base_layer, found
    if not isinstance(base, nn.Linear) or type(base).forward not in FORWARDS:
        return _own_forward(base)
    return "it has hooks" if hooked(base) else PlainLinear(base, adapters)


def read_adapters(module: Any, names: Iterable[str] | None = None) -> list[Adapter] | str:
    """The adapters of PEFT's LoRA around a linear, or in words what is not plain about one; `names` as above. Hooks are
    not looked at."""
    if module.merged:
        return "its adapter is merged"
    if names is None:
        names = () if module.disable_adapters else module.active_adapters
    adapters = []
    for name in names:
        if name not in module.lora_A:
            continue
        if name in module.lora_variant:
            return f"its LoRA is a variant ({type(module.lora_variant[name]).__name__})"
        a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        if b.bias is not None:
            return "its lora_B has a bias"
        if not isinstance(dropout, (nn.Dropout, nn.Identity)):
            return "its adapter's dropout is not PEFT's own"
        probability = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        adapters.append(Adapter(name, a.weight, b.weight, module.scaling[name], probability))
    return adapters


def hooked(module: nn.Module) -> bool:
    """True where something watches or replaces the module's forward, which a fused function would pass by."""
    return watched(module) or "forward" in module.__dict__


def watched(module: nn.Module) -> bool:
    """True where hooks are on the module."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def _own_forward(module: nn.Module) -> str:
    return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__} has a forward of its own"
