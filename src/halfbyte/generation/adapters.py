"""PEFT's adapters by name: which one is active, which module computes for one, and how to switch to one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from peft.functional import set_adapter
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ..adapter_kinds import adapter_type_of
from ..utils.errors import ModelError

# Types whose modules compute with the adapter whatever is active, or by the forward of PEFT's model around them.
REPLACING_TYPES = "ADAPTION_PROMPT", "SHADOW", "XLORA"


class Unsupported(Exception):
    """Raised with the reason why a model needs transformers' own forward."""


class MixedRows(Unsupported):
    """Raised when rows of one batch have adapters that need different copies of a module."""


def adapter_names(model: Any) -> list[str]:
    """Return the adapters of a model: of a PeftModel, or of a transformers model with adapters in its layers."""
    return list(getattr(model, "peft_config", None) or {})


def adapter_layers(model: nn.Module) -> list[Any]:
    """Return PEFT's modules that compute with the active adapter."""
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def _holds(layer: Any, name: str) -> bool:
    """Return whether one of `adapter_layers` has an adapter of this name."""
    names = layer._adapters if isinstance(layer, AuxiliaryTrainingWrapper) else layer._all_available_adapter_names()
    return name in names


def active_adapter(model: Any) -> str | None:
    """Return the adapter that the model computes with, or None if it has none or adapters are disabled.

    Raises:
        ModelError: several adapters are active, or the layers' states differ.
    """
    if not (names := adapter_names(model)):
        return None
    layers = adapter_layers(model)
    if not layers:  # e.g. prompt tuning
        return None if getattr(model, "_adapters_disabled", False) else getattr(model, "active_adapter", names[0])
    if len({layer.disable_adapters for layer in layers}) > 1:
        raise ModelError(
            "adapters are disabled in some layers of the model and enabled in others",
            "enable or disable them in all layers, or name the adapter to generate with",
        )
    if layers[0].disable_adapters:
        return None
    active = sorted({name for layer in layers for name in layer.active_adapters})
    if len(active) > 1:
        raise ModelError(
            f"the model has {len(active)} active adapters ({', '.join(active)}); halfbyte generates with one",
            "name one of them, or combine them by PEFT's add_weighted_adapter",
        )
    if active and any(not layer.active_adapters and _holds(layer, active[0]) for layer in layers):
        raise ModelError(
            f"adapter {active[0]!r} is active in some of its layers only",
            "set it by set_adapter, or name the adapter to generate with",
        )
    return active[0] if active else None


def check_kinds(model: Any, adapters: Sequence[str | None]) -> None:
    """Raise unless the layers of the model, which generation calls, compute all that these adapters change.

    Raises:
        ModelError: an adapter acts outside of the model's layers, e.g. prompt tuning or X-LoRA.
    """
    layers = adapter_layers(model)
    for name in adapter_names(model):
        config = model.peft_config[name]
        adapter_type = adapter_type_of(vars(config))
        if adapter_type in REPLACING_TYPES:
            reason = f"is of the kind {adapter_type}, which replaces parts of the model"
        elif name not in adapters:
            continue
        elif adapter_type == "POLY":
            reason = "is of the kind POLY, which needs task ids"
        elif getattr(config, "alora_invocation_tokens", None):
            reason = "is an activated LoRA, which begins in the middle of a prompt"
        elif adapter_type != "LORA" and not any(_holds(layer, name) for layer in layers):  # LoRA: merged (qat)
            reason = f"is of the kind {adapter_type}, which acts outside of the model's layers"
        else:
            continue
        raise ModelError(f"adapter {name!r} {reason}; halfbyte cannot generate with it", "use PEFT's model.generate")


def module_of(module: Any, adapters: Sequence[str | None]) -> Any:
    """Return the module that computes for rows with these adapters (None: the base), whichever adapter is active.

    This is the copy that PEFT trains for the adapter (`modules_to_save`), or else the base's module. Linears with LoRA
    are read by `linears.Linears`.

    Raises:
        MixedRows: the adapters have different copies.
        Unsupported: an adapter changes the module in another way, e.g. some rows of an embedding.
    """
    if isinstance(module, ModulesToSaveWrapper):
        copies: Any = module.modules_to_save
        owners = {name if name is not None and name in copies else None for name in adapters}
        if len(owners) > 1:
            raise MixedRows(f"adapters have copies of a {type(module.original_module).__name__} (modules_to_save)")
        owner = owners.pop()
        return module.original_module if owner is None else copies[owner]
    if isinstance(module, AuxiliaryTrainingWrapper):
        base: Any = module.original_module
        merged = any(layer.merged for layer in module.modules() if isinstance(layer, BaseTunerLayer))
    elif isinstance(module, BaseTunerLayer):
        base, merged = module.get_base_layer(), module.merged
    else:
        return module
    if merged or any(name is not None and _holds(module, name) for name in adapters):
        raise Unsupported(f"an adapter changes a {type(base).__name__} ({type(module).__name__})")
    return base


@contextlib.contextmanager
def adapter_set(model: nn.Module, layers: Sequence[Any], name: str | None) -> Iterator[None]:
    """Compute with one adapter (None: the base) inside the context, then restore the model.

    Args:
        layers: `adapter_layers(model)`.

    Raises:
        ModelError: another adapter is merged into the weights.
    """
    if all(_is_set(layer, name) for layer in layers):
        yield
        return
    if any(getattr(layer, "merged", False) for layer in layers):
        target = "the base" if name is None else f"adapter {name!r}"
        raise ModelError(f"{target} is asked for, but an adapter is merged into the weights", "call unmerge_adapter")
    states = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for layer in layers:
            layer._disable_adapters = name is None
        if name is not None:
            set_adapter(model, name, inference_mode=True)
        yield
    finally:
        for layer, active, disabled in states:
            layer._active_adapter = active
            layer._disable_adapters = disabled
        for parameter, wanted_gradient in trained:
            parameter.requires_grad_(wanted_gradient)


def _is_set(layer: Any, name: str | None) -> bool:
    """Return whether a layer computes with exactly this adapter."""
    if layer.disable_adapters or name is None:
        return layer.disable_adapters and name is None
    layer_adapters = [active for active in layer.active_adapters if _holds(layer, active)]
    return layer_adapters == ([name] if _holds(layer, name) else [])
