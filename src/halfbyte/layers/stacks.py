"""Modules of other packages with quantized stacks among their parameters: how their state dicts name them.

Entries are those of a `QuantizedLinear`, under the parameter's name: `gate_up_proj`, `gate_up_proj.absmax`, ...
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..formats import recognize
from ..formats.base import entry_name
from ..tensor import QuantizedTensor
from ..utils.errors import CheckpointError


def hold_stacks(module: nn.Module) -> None:
    """Have `module` write its quantized parameters to state dicts, and read them, as their formats do."""
    module.register_state_dict_post_hook(_write)
    module.register_load_state_dict_pre_hook(_read)


def _stacks(module: nn.Module) -> dict[str, Any]:
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if isinstance(parameter, QuantizedTensor)}


def _write(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, stack in _stacks(module).items():
        if stack.is_meta or stack.is_freed:  # not here: nothing saves it
            continue
        del state[f"{prefix}{name}"]
        entries = stack.format.to_state(stack.parts, tuple(stack.shape), stack.dtype)
        state |= {entry_name(f"{prefix}{name}", suffix): value for suffix, value in entries.items()}


def _read(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, stack in _stacks(module).items():
        full = f"{prefix}{name}"
        found = {key.removeprefix(full).lstrip("."): key for key in state if f"{key}.".startswith(f"{full}.")}
        if not found.keys() - {""}:
            continue
        entries = {suffix: state.pop(key) for suffix, key in found.items()}
        cls = recognize(entries, prefer=type(stack.format))
        format_, parts, shape, dtype = cls.from_state(entries, full)
        if shape != tuple(stack.shape):
            said = f"{full} has shape {shape} in the checkpoint, {tuple(stack.shape)} in the model"
            raise CheckpointError(said, "load a checkpoint of this model")
        loaded = QuantizedTensor(format_, parts, shape, dtype).to(stack.device)
        setattr(module, name, nn.Parameter(loaded, requires_grad=False))
        state[full] = getattr(module, name).detach()
