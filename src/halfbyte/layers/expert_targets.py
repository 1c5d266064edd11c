"""Which stacked experts get adapters, and what PEFT makes of the names that say so."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from torch import nn

from ..config import Adapter
from ..modeling.architectures import ALL_LINEAR, expert_stacks, expert_targets
from ..utils.errors import ModelError
from ..utils.notices import notice
from .expert_adapters import expert_wrappers
from .module_names import named_by
from .router_adapters import WEIGHT, router_weights, router_wrappers


def parameter_targets(model: nn.Module, adapter: Adapter) -> list[str]:
    """What PEFT's config is to name where experts are adapted."""
    return expert_targets(model) if adapter.target_parameters is None else adapter.target_parameters


def adapted_experts(model: nn.Module, adapter: Adapter) -> set[str]:
    """Names of the stacks of experts that get adapters.

    Raises:
        ModelError: `target_parameters` names something else.
    """
    if adapter.target_parameters is None and (adapter.target_modules != ALL_LINEAR or adapter.use_dora):
        if adapter.use_dora and expert_targets(model):
            notice("experts-dora", "experts get no adapter: PEFT has no DoRA of parameters")
        return set()
    stacks = expert_stacks(model, [])
    targets = parameter_targets(model, adapter)
    routers = router_weights(model)
    for target in targets:
        if not any(named_by(name, target) for name in (*stacks, *routers)):
            known = ", ".join(expert_targets(model))
            raise ModelError(
                f"target_parameters: no stack of experts or router is named {target!r}",
                f"this model's stacks: {known}" if known else "leave it out: halfbyte knows no stack of this model",
            )
    if targets and adapter.use_dora:
        raise ModelError("target_parameters: PEFT has no DoRA of parameters", "set use_dora: false")
    return {stack for stack in stacks if any(named_by(stack, target) for target in targets)}


def adapted_routers(model: nn.Module, adapter: Adapter, named: set[str]) -> set[str]:
    """Names of the matrices of routers that get adapters: those that targets name.

    Args:
        named: the modules that `target_modules` names.

    Raises:
        ModelError: DoRA is asked for, too.
    """
    targets = adapter.target_parameters or ()
    found = {
        name
        for name in router_weights(model)
        if name.removesuffix(WEIGHT) in named or any(named_by(name, target) for target in targets)
    }
    if found and adapter.use_dora:
        said = f"{min(found)} is of a router, whose adapter is one of a parameter: PEFT has no DoRA of these"
        raise ModelError(f"use_dora: {said}", "leave the router out of the targets, or set use_dora: false")
    return found


def name_past_experts(lora: Any, model: nn.Module, linears: set[str]) -> None:
    """PEFT takes gate_proj, up_proj and down_proj of some mixtures for their routed experts, whose linears they were in
    transformers 4, when it makes an adapter and when it reads one. What it would take so is named by its parameter,
    which PEFT reads as it stands and `by_modules` makes a linear's own adapter of.

    Args:
        linears: names of the modules that get adapters.
    """
    targets: Any = lora.target_modules
    read = copy.deepcopy(lora)
    _convert(read, model)
    if isinstance(targets, str):  # PEFT makes leaves of what it matches, and parameters of some leaves
        if set(read.target_parameters or ()) == set(lora.target_parameters or ()):
            return
        read.target_modules = lora.target_modules = targets = set(linears)
        _convert(read, model)
    taken = set(targets) - set(read.target_modules or ())
    if not taken:
        return
    lora.target_modules = set(targets) - taken
    lora.target_parameters = sorted({*(lora.target_parameters or ()), *(f"{name}{WEIGHT}" for name in taken)})
    for patterns in (lora.rank_pattern, lora.alpha_pattern):  # which PEFT compares with the parameter's name then
        patterns |= {rf"({name})\{WEIGHT}": value for name, value in patterns.items()}


def _convert(lora: Any, model: nn.Module) -> None:
    conversion.convert_peft_config_for_transformers(lora, model=model, conversions=None)


@contextlib.contextmanager
def by_modules(lora: Any, model: Any) -> Iterator[None]:
    """Inside, PEFT makes adapters of linears where `lora` names their weights (`name_past_experts`), not wrappers of
    parameters, whose forward adds a dense B·A to the weight.

    That PEFT reads them as routed experts is turned off meanwhile, in the one function that does so (0.18 to 0.21).

    Args:
        model: which may have adapters already, whose configs PEFT compares with this one.
    """
    routers = router_weights(model)
    configs = [each for each in (lora, *getattr(model, "peft_config", {}).values()) if _weights(each, routers)]
    if not configs:
        yield
        return
    reads, said = (
        conversion.convert_peft_config_for_transformers,
        [(c.target_modules, c.target_parameters) for c in configs],
    )
    for config in configs:
        weights = _weights(config, routers)
        config.target_modules = {*(config.target_modules or ()), *(name.removesuffix(WEIGHT) for name in weights)}
        config.target_parameters = sorted({*config.target_parameters} - weights) or None
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = reads
        for config, (modules, parameters) in zip(configs, said, strict=True):
            config.target_modules, config.target_parameters = modules, parameters


def _weights(lora: Any, routers: set[str]) -> set[str]:
    """What a config names by the parameter `weight`: of linears, not of routers."""
    named = {name for name in getattr(lora, "target_parameters", None) or () if name.endswith(WEIGHT)}
    return {name for name in named if not any(named_by(router, name) for router in routers)}


def say_how_many(model: PeftModel) -> None:
    """Experts have many times the adapters that attention has, which decides what a run takes; routers have few, which
    decide where tokens go."""
    routers = [module for _, module in router_wrappers(model)]
    if routers:
        weights = sum(p.numel() for each in routers for part in (each.lora_A, each.lora_B) for p in part.parameters())
        said = f"trained: {weights / 1e6:.3g}M weights on {len(routers)} routers, which targets name"
        notice("routers-adapted", f"{said} (without dropout: PEFT's adapter of a parameter has none)")
    on_experts = sum(p.numel() for _, each in expert_wrappers(model) for p in each.lora_A.parameters())
    on_experts += sum(p.numel() for _, each in expert_wrappers(model) for p in each.lora_B.parameters())
    if on_experts:
        others = sum(p.numel() for p in model.parameters() if p.requires_grad) - on_experts
        said = f"trained: {on_experts / 1e6:.3g}M weights on experts, {others / 1e6:.3g}M beside them"
        notice("experts-adapted", f"{said} (target_parameters: [] leaves experts out)")
