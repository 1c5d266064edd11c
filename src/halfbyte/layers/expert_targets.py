"""Which stacked experts get adapters, and what PEFT makes of the names that say so."""

from __future__ import annotations

import copy
from typing import Any

from peft import LoraConfig, PeftModel
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from ..architectures import ALL_LINEAR, expert_stacks, expert_targets
from ..config import Adapter
from ..errors import ModelError
from ..notices import notice
from .expert_adapters import expert_wrappers


def named_by(module: str, target: str) -> bool:
    """PEFT's rule: the whole name, or its end after a dot."""
    return module == target or module.endswith(f".{target}")


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
    for target in targets:
        if not any(named_by(stack, target) for stack in stacks):
            known = ", ".join(expert_targets(model)) or "none that halfbyte runs"
            raise ModelError(
                f"target_parameters: no stack of experts is named {target!r}", f"this model's stacks: {known}"
            )
    if targets and adapter.use_dora:
        raise ModelError("target_parameters: PEFT has no DoRA of parameters", "set use_dora: false")
    return {stack for stack in stacks if any(named_by(stack, target) for target in targets)}


def leave_to_experts(lora: LoraConfig, model: nn.Module, adapter: Adapter) -> None:
    """PEFT takes gate_proj, up_proj and down_proj of some mixtures for their routed experts, whose linears they were in
    transformers 4, when it makes an adapter and when it reads one. What it would take so is left out.

    Raises:
        ModelError: `target_modules` names it.
    """
    read: Any = copy.deepcopy(lora)
    convert_peft_config_for_transformers(read, model=model, conversions=None)
    named: Any = lora.target_modules
    if isinstance(named, str):
        taken = set()
        if set(read.target_parameters or ()) == set(lora.target_parameters or ()):
            return
    elif not (taken := set(named) - set(read.target_modules)):
        return
    what = ", ".join(sorted({name.rpartition(".")[2] for name in taken})) or repr(named)
    config: Any = model.config
    said = f"PEFT takes {what} of a {config.model_type} for its routed experts"
    if adapter.target_modules != ALL_LINEAR:
        raise ModelError(f"target_modules: {said}", "leave it out, and name experts in target_parameters")
    lora.target_modules = sorted(set(named) - taken)
    notice("experts-names", f"{said}: dense layers and shared experts get no adapter")


def say_how_many(model: PeftModel) -> None:
    """Experts have many times the adapters that attention has, which decides what a run takes."""
    on_experts = sum(p.numel() for _, each in expert_wrappers(model) for p in each.lora_A.parameters())
    on_experts += sum(p.numel() for _, each in expert_wrappers(model) for p in each.lora_B.parameters())
    if on_experts:
        others = sum(p.numel() for p in model.parameters() if p.requires_grad) - on_experts
        said = f"trained: {on_experts / 1e6:.3g}M weights on experts, {others / 1e6:.3g}M beside them"
        notice("experts-adapted", f"{said} (target_parameters: [] leaves experts out)")
