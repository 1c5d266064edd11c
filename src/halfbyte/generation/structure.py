"""Structure of a model as a decoder has read it: modules, their constants, and addresses of their tensors.

A decoder is valid while `structure_of` returns an equal list. Weights of linears and experts are compared by their
readers (`linears`, `mlp`), and adapters' factors are read again in every call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ..modeling.architectures import non_text_modules
from ..modeling.label_loss import is_ours
from ..modeling.patch_record import is_bound
from ..modeling.routers import Routers
from .adapters import Unsupported

CONSTANTS = bool, int, float, str, tuple, torch.dtype, FunctionType, type(None)
MODES = "training", "gradient_checkpointing"  # change no number in inference


def structure_of(causal: Any) -> list[Any]:
    """Return a list that differs once a module, a constant or the place of a tensor of a causal LM has changed.

    Vision towers and projectors do not count, since decoders do not read them. The list references the modules inside
    of the causal LM, so that their identities are not reused, but not the causal LM.

    Raises:
        Unsupported: a module has hooks or a forward that did not come with its class.
    """
    config = causal.config.get_text_config()
    structure: list[Any] = [type(causal), config.to_dict()]
    towers = set(non_text_modules(causal))
    for name, module in _modules(causal, "", towers):
        if not isinstance(module, BaseTunerLayer):  # their readers check the parts that they read
            _check_forward(name, module)
        constants: list[Any] = []
        if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            public = [(key, value) for key, value in vars(module).items() if key[0] != "_" and key not in MODES]
            constants = [(key, value) for key, value in public if type(value) in CONSTANTS]
        tensors = [*module._parameters.items(), *module._buffers.items()]
        constants += [(key, _address(tensor)) for key, tensor in tensors if tensor is not None]
        structure.append((name, module if name else None, constants))
    return structure


def _modules(module: nn.Module, name: str, excluded: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their names, except `excluded` ones and the factors of adapters."""
    yield name, module
    for key, child in module._modules.items():
        path = f"{name}.{key}" if name else key
        is_factor = key != "base_layer" and isinstance(module, BaseTunerLayer)
        if child is not None and path not in excluded and not is_factor:
            yield from _modules(child, path, excluded)


def _address(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = type(tensor.data) is torch.Tensor  # quantized tensors have no address of their own
    return tensor.data_ptr() if plain else id(tensor), tensor.dtype, tensor.shape


def _check_forward(name: str, module: nn.Module) -> None:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks]
    # The hooks of `modeling.routers` are inactive in generation.
    if not all(isinstance(getattr(function, "__self__", None), Routers) for function in functions):
        raise Unsupported(f"{name or type(module).__name__} has hooks")
    forward = vars(module).get("forward")
    is_supported = is_bound(module) or is_ours(forward) or _is_halfbytes(forward)
    has_autocast = "_original_forward" in vars(module)  # accelerate's
    if forward is not None and not is_supported and not has_autocast:
        raise Unsupported(f"{name or type(module).__name__} has a forward of its own")
    owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    defined = getattr(vars(owner)["forward"], "__module__", owner.__module__)
    if defined != owner.__module__ and defined.partition(".")[0] not in ("torch", "transformers", "halfbyte"):
        raise Unsupported(f"the forward of {owner.__name__} was replaced by {defined}'s")


def _is_halfbytes(forward: Any) -> bool:
    """Return whether halfbyte bound this forward to a module."""
    function = forward.__func__ if isinstance(forward, MethodType) else forward
    function = function.func if isinstance(function, partial) else function
    return str(getattr(function, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")
