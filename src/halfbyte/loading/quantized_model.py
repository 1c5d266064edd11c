"""Overrides of transformers' model methods that count or cast weights, for models with quantized weights."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..formats import Format
from ..layers import QuantizedLinear, QuantizedWeight
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError

FLAGS = ("is_loaded_in_4bit", "is_loaded_in_8bit")  # flags that PEFT, TRL, accelerate and Trainer read


class CastError(ModelError, ValueError):
    """Attempt to cast a quantized model; also a ValueError, which transformers raises for other quantizers."""


class _QuantizedModel:
    """Overrides for the class of a loaded model, since transformers does not ask quantizers about these methods."""

    _plain: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new_instance, (self._plain,), self.__dict__

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the model.

        Raises:
            CastError: a dtype is given.
        """
        casts = "dtype" in kwargs or any(isinstance(argument, (torch.dtype, Tensor)) for argument in args)
        if casts and getattr(self, "is_quantized", False):
            raise CastError(
                "a quantized model cannot be cast to another dtype",
                "give from_pretrained the dtype, or call model.dequantize() first",
            )
        return super().to(*args, **kwargs)  # type: ignore[misc]

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Return the bytes of stored parameters, scales included, and of buffers."""
        tensors = [*self.parameters(), *(self.buffers() if return_buffers else ())]  # type: ignore[attr-defined]
        return sum(tensor.nbytes for tensor in tensors)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return the number of parameters; transformers would import bitsandbytes for `is_loaded_in_4bit` models."""
        tables = [module for module in self.modules() if isinstance(module, nn.Embedding)]  # type: ignore[attr-defined]
        excluded = {id(table.weight) for table in tables} if exclude_embeddings else set()
        counted = [p for p in self.parameters() if id(p) not in excluded]  # type: ignore[attr-defined]
        return sum(p.numel() for p in counted if p.requires_grad or not only_trainable)


_classes: dict[type, type] = {}


def _class_of(cls: type) -> type:
    if cls not in _classes:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "_plain": cls}
        _classes[cls] = type(cls.__name__, (_QuantizedModel, cls), names)
    return _classes[cls]


def _new_instance(cls: type) -> Any:
    return object.__new__(_class_of(cls))


def mark_quantized(model: PreTrainedModel, formats: Collection[Format]) -> None:
    """Set the flags that other libraries read on a quantized model, and name each quantized weight.

    A model counts as 4-bit if any weight takes fewer than 8 bits, otherwise as 8-bit.
    """
    small = any(format_.bits_per_weight((1024, 1024)) < 8 for format_ in formats)
    for flag, value in zip(FLAGS, (small, not small), strict=True):
        setattr(model, flag, value)
    if not isinstance(model, _QuantizedModel):
        model.__class__ = _class_of(type(model))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            parameter.name = name
    # accelerate refuses to train a 4-bit model on "cuda:0" that was placed on "cuda": add the index
    for key, device in getattr(model, "hf_device_map", {}).items():
        if isinstance(device, (str, torch.device)) and device != "disk" and torch.device(device).index is None:
            held = next(model.get_submodule(key).parameters(), None)
            if held is not None and held.device.index is not None:
                model.hf_device_map[key] = held.device


def unfilled_conv1d(layer: Conv1D) -> QuantizedLinear:
    """Return an unfilled linear layer for a `Conv1D`; its weight [in, out] is transposed once, while loading."""
    inputs, outputs = layer.weight.shape
    with torch.device(layer.weight.device):
        linear = nn.Linear(inputs, outputs, bias=False, dtype=layer.weight.dtype)
    linear.bias = layer.bias
    return QuantizedLinear.unfilled(linear.train(layer.training))


def as_conv1d(module: QuantizedLinear, weight: Tensor) -> Conv1D:
    """Return a `Conv1D` with the transpose of `weight` and the bias of `module`."""
    with torch.device("meta"):
        layer = Conv1D(module.out_features, module.in_features)
    layer.weight, layer.bias = nn.Parameter(weight.t().contiguous(), requires_grad=False), module.bias
    return layer.train(module.training)


def as_linear(module: QuantizedLinear, weight: nn.Parameter) -> nn.Linear:
    """Return a plain linear layer with `weight` and the bias of `module`."""
    with torch.device("meta"):
        plain = nn.Linear(module.in_features, module.out_features, bias=False)
    plain.weight, plain.bias = weight, module.bias
    return plain.train(module.training)


def dequantize(model: Any, dtype: torch.dtype, stacks: Collection[str], conv1d: Collection[str]) -> Any:
    """Replace quantized layers by plain ones that hold their values, rounded once to `dtype`.

    Args:
        stacks: names of quantized stacks of experts.
        conv1d: names of layers that were a `Conv1D`, and become one again.

    Raises:
        ModelError: the model has quantized stacks of experts, whose layout depends on the checkpoint.
    """
    if stacks:
        raise ModelError(
            f"{next(iter(stacks))} is a quantized stack of experts, which dequantize() does not convert",
            "load the 16-bit model",
        )
    for name, module in list(model.named_modules()):
        if not isinstance(module, QuantizedWeight):
            continue
        weight = nn.Parameter(module.weight.dequantize(dtype), requires_grad=False)
        if not isinstance(module, QuantizedLinear):
            module.weight = weight
            module.__class__ = next(cls for cls in type(module).__mro__ if not issubclass(cls, QuantizedWeight))  # type: ignore[assignment]
            continue
        plain = as_conv1d(module, weight.detach()) if name in conv1d else as_linear(module, weight)
        model.set_submodule(name, plain)
        if hasattr(module, "_hf_hook"):
            from accelerate.hooks import add_hook_to_module, remove_hook_from_module

            hook = module._hf_hook
            remove_hook_from_module(module)
            add_hook_to_module(plain, hook)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for flag in FLAGS:
        delattr(model, flag)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._is_quantized = False
    model.__class__ = model._plain
    return model
