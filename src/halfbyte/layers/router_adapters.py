"""PEFT's LoRA on routers that hold a matrix of their own, which only a name in a run's targets puts there.

Such a router is no linear: one forward makes logits, probabilities and a choice of x·Wᵀ. So PEFT adapts its parameter,
by `ParamWrapper`, which holds A and B and writes the files. Its forward registers a parametrization of the router's
class in each call; ours calls the router with W + scaling·B·A, added in fp32 and rounded once to W's dtype: the weight
that a merge writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ..modeling.architectures import is_router
from ..utils.errors import ModelError
from .module_names import named_by
from .plain import Adapter, read_adapters

WEIGHT = ".weight"


def router_weights(model: nn.Module) -> set[str]:
    """Names of the matrices of a model's routers, with adapters or without."""
    return {f"{name.replace('.base_layer', '')}{WEIGHT}" for name, each in model.named_modules() if is_router(each)}


def name_routers(lora: Any, model: nn.Module, linears: set[str], routers: set[str]) -> None:
    """Have PEFT's config name routers by their parameters: as modules it would refuse them.

    Args:
        linears: names of the modules that get adapters, without routers.
        routers: names of the matrices that get adapters.
    """
    if not routers:
        return
    modules = {name.removesuffix(WEIGHT) for name in routers}
    targets, held = lora.target_modules, [name for name, _ in model.named_parameters()]
    kept = set() if isinstance(targets, str) else {
        each for each in targets if not any(named_by(name, each) for name in modules)
    }  # fmt: skip
    lora.target_modules = kept | {name for name in linears if not any(named_by(name, each) for each in kept)}
    others = {each for each in lora.target_parameters or () if not any(named_by(name, each) for name in routers)}
    for name in routers:
        short = ".".join(name.split(".")[-3:])  # mlp.gate.weight, where that is of no other
        others.add(short if all(each in routers for each in held if named_by(each, short)) else name)
    lora.target_parameters = sorted(others)
    for patterns in (lora.rank_pattern, lora.alpha_pattern):  # which PEFT compares with the parameter's name
        patterns |= {rf"({name})\{WEIGHT}": value for name, value in patterns.items()}


def router_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of the matrix and module of each of PEFT's wrappers around a router."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and is_router(module.get_base_layer()):
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module


def fold_routers(model: nn.Module) -> None:
    """Have PEFT's wrappers around routers call these with the weight that a merge would give them."""
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
        weight = folded(router.weight, active).to(router.weight.dtype)
    # called, so that hooks on it run: those that balance it, too
    return torch.func.functional_call(router, {"weight": weight}, arguments, keywords)


def folded(weight: Tensor, adapters: list[Adapter]) -> Tensor:
    """`weight` [E, K] and what adapters add to it, in fp32 or wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    found = weight.to(dtype)
    for each in adapters:
        found = torch.addmm(found, each.b.to(dtype), each.a.to(dtype), alpha=each.scaling)
    return found
