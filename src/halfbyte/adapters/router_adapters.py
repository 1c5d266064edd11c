"""PEFT's LoRA on mixture-of-experts routers. Routers get an adapter only if the run's targets name them.

These routers are not `nn.Linear`s: one forward computes logits, probabilities and the expert choice from their weight.
PEFT therefore adapts the parameter with `ParamWrapper`, which owns A and B and writes the files. PEFT's own forward
registers a parametrization in each call. The forward defined here calls the router with W + scaling·B·A instead, added
in fp32 and rounded once to W's dtype, which equals the merged weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ..layers.plain import Adapter, read_adapters
from ..modeling.architectures import is_router
from ..utils.errors import ModelError
from .module_names import named_by

WEIGHT = ".weight"


def router_weights(model: nn.Module) -> set[str]:
    """Names of the weights of a model's routers, with or without adapters."""
    return {f"{name.replace('.base_layer', '')}{WEIGHT}" for name, module in model.named_modules() if is_router(module)}


def name_routers(lora: Any, model: nn.Module, linears: set[str], routers: set[str]) -> None:
    """Move routers in PEFT's config from target modules, which PEFT refuses, to target parameters.

    Args:
        linears: names of the modules that get adapters, without routers.
        routers: names of the router weights that get adapters.
    """
    if not routers:
        return
    modules = {name.removesuffix(WEIGHT) for name in routers}
    targets = set() if isinstance(lora.target_modules, str) else set(lora.target_modules)
    targets = {target for target in targets if not any(named_by(name, target) for name in modules)}
    lora.target_modules = targets | {name for name in linears if not any(named_by(name, t) for t in targets)}
    weights = {target for target in lora.target_parameters or () if not any(named_by(name, target) for name in routers)}
    parameter_names = [name for name, _ in model.named_parameters()]
    for name in routers:
        short = ".".join(name.split(".")[-3:])  # mlp.gate.weight, if it matches only routers
        weights.add(short if all(n in routers for n in parameter_names if named_by(n, short)) else name)
    lora.target_parameters = sorted(weights)
    for patterns in (lora.rank_pattern, lora.alpha_pattern):  # PEFT matches these against the parameter's name
        patterns |= {rf"({name})\{WEIGHT}": value for name, value in patterns.items()}


def router_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of the weight and module, for each PEFT wrapper around a router."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and is_router(module.get_base_layer()):
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module


def attach_router_forwards(model: nn.Module) -> None:
    """Replace the forward of PEFT's wrappers around routers by one that uses the merged weight."""
    for _, wrapper in router_wrappers(model):
        wrapper.forward = MethodType(_forward, wrapper)


def _forward(wrapper: Any, *arguments: Any, **keywords: Any) -> Any:
    router = wrapper.get_base_layer()
    active = [] if wrapper.merged else read_adapters(wrapper)
    if isinstance(active, str):
        raise ModelError(f"{type(router).__name__}: {active}", "activate plain LoRA")
    if not active:
        return router(*arguments, **keywords)
    with torch.autocast(router.weight.device.type, enabled=False):
        weight = folded_weight(router.weight, active).to(router.weight.dtype)
    # called as a module, so that its hooks run, including those for load balancing
    return torch.func.functional_call(router, {"weight": weight}, arguments, keywords)


def folded_weight(weight: Tensor, adapters: list[Adapter]) -> Tensor:
    """`weight` [E, K] plus the adapters' s·B·A, in fp32 or wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    total = weight.to(dtype)
    for adapter in adapters:
        total = torch.addmm(total, adapter.b.to(dtype), adapter.a.to(dtype), alpha=adapter.scaling)
    return total
