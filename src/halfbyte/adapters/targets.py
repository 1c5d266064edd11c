"""The modules of a model that get adapters, by `target_modules` and the keys that choose among them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from ..config import Adapter
from ..modeling.architectures import ALL_LINEAR, all_linear, is_linear, is_router, vision_part, vision_parts
from ..utils.errors import ModelError
from .module_names import check_names, matching, named_by, unknown


def adapted_modules(model: nn.Module, adapter: Adapter) -> tuple[Any, set[str]]:
    """Return `target_modules` for PEFT's config, and the names of the modules that they match.

    Modules of a frozen vision tower or projector are left out: of names that also match some of these, full names of
    the others are returned.

    Raises:
        ModelError: a target matches no module, a module that is not a linear layer, or frozen modules only.
        ConfigError: `target_modules` is not a valid regular expression.
    """
    targets = adapter.target_modules
    names = [name for name, _ in model.named_modules() if name]
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    parts = vision_parts(model)
    if targets == ALL_LINEAR:
        listed = all_linear(model, adapter.trained_vision)
        return listed, {name for name in names if any(named_by(name, target) for target in listed)}
    if isinstance(targets, list):
        check_names("target_modules", targets, names, suggest=linears)
        adapted = {name for name in names if any(named_by(name, target) for target in targets)}
    elif not (adapted := matching("target_modules", targets, names)):
        raise ModelError(*unknown("target_modules", targets, linears))
    for name in sorted(adapted):
        module = model.get_submodule(name)
        if not is_linear(module) and not is_router(module):
            wrong = f"target_modules: {name} is a {type(module).__name__}, which computes no x·Wᵀ that LoRA can adapt"
            raise ModelError(wrong, "remove it, or use all-linear")
    frozen = {name: key for name in adapted if (key := vision_part(name, parts)) and getattr(adapter, key)}
    if adapted and not adapted - frozen.keys():
        key = frozen[min(frozen)]
        raise ModelError(
            f"target_modules names modules of the frozen vision part only ({min(frozen)})",
            f"set {key}: false, or name modules of the language model",
        )
    return (sorted(adapted - frozen.keys()) if frozen else targets), adapted - frozen.keys()


def is_selected(adapter: Adapter, name: str, targets: str | list[str]) -> bool:
    """Return whether PEFT adapts the module `name`: it is in `targets`, in a chosen layer and not excluded."""
    rule = SimpleNamespace(
        target_modules=targets,
        exclude_modules=adapter.exclude_modules,
        layers_to_transform=adapter.layers_to_transform,
        layers_pattern=adapter.layers_pattern,
    )
    return bool(check_target_module_exists(rule, name))


def selected_modules(model: nn.Module, adapter: Adapter, targets: Any, modules: set[str]) -> set[str]:
    """Return the modules that are in a chosen layer and not excluded.

    Args:
        targets, modules: from `adapted_modules`.

    Raises:
        ModelError: a key names none of `modules`, or leaves none.
        ConfigError: `exclude_modules` is not a valid regular expression.
    """
    if isinstance(adapter.exclude_modules, str):
        if not matching("exclude_modules", adapter.exclude_modules, modules):
            raise ModelError(*unknown("exclude_modules", adapter.exclude_modules, modules))
    else:
        check_names("exclude_modules", adapter.exclude_modules or (), modules)
    for layer in adapter.layers_to_transform or ():
        only = adapter.model_copy(update={"exclude_modules": None, "layers_to_transform": [layer]})
        if not any(is_selected(only, name, targets) for name in modules):
            lists = f" of {', '.join(adapter.layers_pattern)}" if adapter.layers_pattern else ""
            wrong = f"layers_to_transform: no module of target_modules is in layer {layer}{lists}"
            raise ModelError(wrong, "number the layers from 0, as in the names of the model's modules")
    selected = {name for name in modules if is_selected(adapter, name, targets)}
    if modules and not selected:
        raise ModelError("exclude_modules leaves no module with an adapter", "exclude fewer modules")
    return selected
