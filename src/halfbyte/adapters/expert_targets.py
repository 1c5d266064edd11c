"""Selection of the stacked experts and routers that get adapters, and the translation of target names for PEFT."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from torch import nn

from ..adapter_kinds import adapter_kind
from ..config import Adapter
from ..layers.plain import factor_holders
from ..modeling.architectures import ALL_LINEAR, expert_stacks, expert_targets
from ..utils.errors import ModelError
from ..utils.notices import notice
from .expert_adapters import expert_wrappers
from .module_names import named_by
from .router_adapters import WEIGHT, router_weights, router_wrappers


def parameter_targets(model: nn.Module, adapter: Adapter) -> list[str]:
    """The `target_parameters` for PEFT's config: the user's, or all stacks of experts."""
    return expert_targets(model) if adapter.target_parameters is None else adapter.target_parameters


def adapted_experts(model: nn.Module, adapter: Adapter) -> set[str]:
    """Names of the stacks of experts that get adapters.

    Raises:
        ModelError: a name in `target_parameters` matches no stack and no router, or the adapter takes no parameters.
    """
    refused = adapter_kind(adapter).refused.get("target_parameters")
    if adapter.target_parameters is None and (adapter.target_modules != ALL_LINEAR or refused):
        if refused and expert_targets(model):
            notice("experts-unadapted", f"experts get no adapter: {refused}")
        return set()
    stacks = expert_stacks(model, [])
    targets = parameter_targets(model, adapter)
    routers = router_weights(model)
    for target in targets:
        if not any(named_by(name, target) for name in (*stacks, *routers)):
            names = ", ".join(expert_targets(model))
            raise ModelError(
                f"target_parameters: no stack of experts or router is named {target!r}",
                f"this model's stacks: {names}" if names else "remove it: this model has no stacked experts",
            )
    if targets and refused:
        raise ModelError(f"target_parameters: {refused}", adapter_kind(adapter).without)
    return {stack for stack in stacks if any(named_by(stack, target) for target in targets)}


def adapted_routers(model: nn.Module, adapter: Adapter, named: set[str]) -> set[str]:
    """Names of the router weights that the targets name.

    Args:
        named: names of the modules that `target_modules` matches.

    Raises:
        ModelError: the adapter takes no parameters.
    """
    targets = adapter.target_parameters or ()
    adapted = {
        name
        for name in router_weights(model)
        if name.removesuffix(WEIGHT) in named or any(named_by(name, target) for target in targets)
    }
    row = adapter_kind(adapter)
    if adapted and (refused := row.refused.get("target_parameters")):
        reason = f"{row.key}: {min(adapted)} is a router's parameter: {refused}"
        raise ModelError(reason, f"leave the router out of the targets, or {row.without}")
    return adapted


def target_by_weight_name(lora: Any, model: nn.Module, linears: set[str]) -> None:
    """Rename targets that PEFT would convert from linears to routed experts.

    For some mixture-of-experts models PEFT converts gate_proj, up_proj and down_proj to the stacked experts, which had
    these names in transformers 4. It converts when it creates an adapter and when it loads one. Such a linear is
    targeted by its parameter name instead, which PEFT does not convert. `weights_as_modules` makes it a linear adapter.

    Args:
        linears: names of the modules that get adapters.
    """
    targets: Any = lora.target_modules
    read = copy.deepcopy(lora)
    _convert(read, model)
    if isinstance(targets, str):  # a regular expression: expand it, since PEFT converts some of its matches
        if set(read.target_parameters or ()) == set(lora.target_parameters or ()):
            return
        read.target_modules = lora.target_modules = targets = set(linears)
        _convert(read, model)
    converted = set(targets) - set(read.target_modules or ())
    if not converted:
        return
    lora.target_modules = set(targets) - converted
    lora.target_parameters = sorted({*(lora.target_parameters or ()), *(f"{name}{WEIGHT}" for name in converted)})
    for patterns in (lora.rank_pattern, lora.alpha_pattern):  # PEFT matches these against the parameter's name
        patterns |= {rf"({name})\{WEIGHT}": value for name, value in patterns.items()}


def _convert(lora: Any, model: nn.Module) -> None:
    conversion.convert_peft_config_for_transformers(lora, model=model, conversions=None)


@contextlib.contextmanager
def weights_as_modules(lora: Any, model: Any) -> Iterator[None]:
    """Within the context, PEFT creates linear adapters where `lora` names a linear's weight (`target_by_weight_name`).

    Otherwise PEFT would create parameter wrappers, whose forward adds a dense B·A to the weight. PEFT's conversion of
    targets to routed experts is patched out within the context (one function in PEFT 0.18 to 0.21).

    Args:
        model: the model; PEFT also compares the configs of its existing adapters with `lora`.
    """
    routers = router_weights(model)
    configs = [config for config in (lora, *getattr(model, "peft_config", {}).values()) if _weights(config, routers)]
    if not configs:
        yield
        return
    convert = conversion.convert_peft_config_for_transformers
    saved = [(config.target_modules, config.target_parameters) for config in configs]
    for config in configs:
        weights = _weights(config, routers)
        config.target_modules = {*(config.target_modules or ()), *(name.removesuffix(WEIGHT) for name in weights)}
        config.target_parameters = sorted({*config.target_parameters} - weights) or None
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert
        for config, (modules, parameters) in zip(configs, saved, strict=True):
            config.target_modules, config.target_parameters = modules, parameters


def _weights(lora: Any, routers: set[str]) -> set[str]:
    """Targets of a config that are weights of linears, excluding routers."""
    named = {name for name in getattr(lora, "target_parameters", None) or () if name.endswith(WEIGHT)}
    return {name for name in named if not any(named_by(router, name) for router in routers)}


def report_adapter_sizes(model: PeftModel) -> None:
    """Report how many trained weights are on experts and on routers."""
    routers = [module for _, module in router_wrappers(model)]
    if routers:
        holders = [holder for wrapper in routers for holder in factor_holders(wrapper)]
        weights = sum(p.numel() for holder in holders for p in holder.parameters())
        notice(
            "routers-adapted",
            f"trained: {weights / 1e6:.3g}M weights on {len(routers)} routers named by the targets (without dropout:"
            " PEFT does not support it on parameters)",
        )
    holders = [holder for _, wrapper in expert_wrappers(model) for holder in factor_holders(wrapper)]
    on_experts = sum(p.numel() for holder in holders for p in holder.parameters())
    if on_experts:
        remaining = sum(p.numel() for p in model.parameters() if p.requires_grad) - on_experts
        counts = f"trained: {on_experts / 1e6:.3g}M weights on experts, {remaining / 1e6:.3g}M on other modules"
        notice("experts-adapted", f"{counts} (target_parameters: [] leaves experts out)")
