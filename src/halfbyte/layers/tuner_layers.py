"""PEFT's layers on quantized weights: merging, unmerging, PEFT's interface for quantized weights, `modules_to_save`.

`layers.quantized` calls `adapt_class` when PEFT wraps a module with quantized weights, in any program. PEFT's merges
then compute with the dequantized weight in fp32, and the sum is stored again in the weight's format. Unmerging restores
the stored bytes, of which merging keeps a copy in host memory. Of a module in `modules_to_save`, a dequantized copy is
trained.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.ia3 import IA3Model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from peft.utils.quantization_utils import QuantizationBackend
from torch import Tensor, nn

from ..formats.retained_update import RetainedUpdate
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice

_updates: ContextVar[list[RetainedUpdate] | None] = ContextVar("updates", default=None)


class HalfbyteBackend(QuantizationBackend):
    """PEFT's access to the quantized weight of a base layer."""

    supports_merge = True
    backend_name = "halfbyte"
    layer_type = "linear"

    def get_base_weight(self, base_layer: Any) -> Tensor:
        """Return the dequantized weight, a new tensor."""
        return base_layer.weight.dequantize()

    def set_base_weight(self, peft_layer: Any, weight_data: Tensor) -> None:
        """Store `weight_data` in the format of the base layer's weight."""
        peft_layer.get_base_layer().weight.data = weight_data


BACKEND = HalfbyteBackend()


@dataclass(frozen=True)
class UnmergedBytes:
    """The bytes of a layer's quantized weight and bias before a merge, on the host.

    Attributes:
        parts: the parts of the weight.
        bias: None if there is none.
        weight: the parameter.
        version: its version after the merge. Any other write to the parameter increments it.
    """

    parts: dict[str, Tensor]
    bias: Tensor | None
    weight: QuantizedTensor
    version: int

    @classmethod
    def copy_of(cls, weight: QuantizedTensor, bias: Tensor | None) -> UnmergedBytes:
        """Copy a layer's parameters."""
        parts = {name: stored.to("cpu", copy=True) for name, stored in weight.parts.items()}
        return cls(parts, None if bias is None else bias.to("cpu", copy=True), weight, weight._version)

    def belong_to(self, weight: QuantizedTensor) -> bool:
        """Return whether nothing else has been written to `weight` since the merge."""
        return weight is self.weight and weight._version == self.version

    def restore(self, bias: Tensor | None) -> None:
        """Write the bytes back."""
        for name, stored in self.weight.parts.items():
            stored.copy_(self.parts[name])
        if bias is not None and self.bias is not None:
            bias.copy_(self.bias)


def quantized_weight(layer: Any) -> QuantizedTensor | None:
    """Return the base weight that a tuner layer adapts if it is quantized."""
    weight = getattr(layer.get_base_layer(), _weight_name(layer), None)
    return weight if isinstance(weight, QuantizedTensor) else None


def adapt_class(cls: type) -> None:
    """Make PEFT's class `cls` merge into quantized weights, or train copies of them; it treats others as before."""
    if issubclass(cls, ModulesToSaveWrapper) and not hasattr(cls.update, "__wrapped__"):
        cls.update = _copying(cls.update)  # type: ignore[method-assign]
    if not issubclass(cls, BaseTunerLayer) or "quantization_backend" in vars(cls):
        return
    cls.quantization_backend = property(_backend, _set_backend)  # type: ignore[assignment]
    for name, wrap in (("merge", _merging), ("unmerge", _unmerging)):
        if hasattr(cls, name):
            setattr(cls, name, wrap(getattr(cls, name)))


def _copying(update: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `update` of PEFT's `ModulesToSaveWrapper` that trains a dequantized copy of a quantized module."""

    @functools.wraps(update)
    def update_dequantized(wrapper: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> None:
        original = wrapper.original_module
        if not any(isinstance(parameter, QuantizedTensor) for parameter in original.parameters()):
            return update(wrapper, adapter_name, tied_module, **kwargs)
        wrapper.original_module = dequantized_copy(original)  # PEFT copies and trains it
        try:
            update(wrapper, adapter_name, tied_module, **kwargs)
        finally:
            wrapper.original_module = original.requires_grad_(False)

    return update_dequantized


def dequantized_copy(module: nn.Module) -> nn.Module:
    """Return a copy of `module` of plain classes with dequantized weights, in the dtype of the weights."""
    copied = copy.deepcopy(module)
    layers: list[Any] = list(copied.modules())
    for layer in layers:
        for name, weight in list(layer.named_parameters(recurse=False)):
            if isinstance(weight, QuantizedTensor):
                setattr(layer, name, nn.Parameter(weight.dequantize()))
        if hasattr(layer, "plain_class"):
            layer.__class__ = layer.plain_class()
    return copied


def _backend(layer: Any) -> QuantizationBackend | None:
    return BACKEND if quantized_weight(layer) is not None else vars(layer).get("_backend")


def _set_backend(layer: Any, backend: QuantizationBackend | None) -> None:
    vars(layer)["_backend"] = backend  # of another library's weights


def _weight_name(layer: Any) -> str:
    return getattr(layer, "parameter_name", "weight")  # of PEFT's ParamWrapper


def _bias(layer: Any) -> nn.Parameter | None:
    """Return the bias of the base layer; merges of some adapters scale it."""
    return getattr(layer.get_base_layer(), "bias", None) if _weight_name(layer) == "weight" else None


@contextlib.contextmanager
def _dequantized(layer: Any, weight: QuantizedTensor) -> Iterator[dict[str, nn.Parameter]]:
    """Within the context, the base layer's weight and bias are copies in fp32 (or fp64), by name."""
    base, bias = layer.get_base_layer(), _bias(layer)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    originals = {_weight_name(layer): weight} if bias is None else {"weight": weight, "bias": bias}
    copies = {name: nn.Parameter(_values(tensor, dtype), requires_grad=False) for name, tensor in originals.items()}
    try:
        for name, copied in copies.items():
            setattr(base, name, copied)
        yield copies
    finally:
        for name, original in originals.items():
            setattr(base, name, original)


def _values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor's values."""
    return tensor.dequantize(dtype) if isinstance(tensor, QuantizedTensor) else tensor.to(dtype, copy=True)


def _store(layer: Any, copies: Mapping[str, Tensor]) -> None:
    for name, values in copies.items():
        getattr(layer.get_base_layer(), name).copy_(values)


def _merging(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's `merge` that stores the merged weight in the format of the base weight."""

    @functools.wraps(merge)
    @torch.no_grad()
    def merge_quantized(layer: Any, *args: Any, **kwargs: Any) -> Any:
        weight = quantized_weight(layer)
        if weight is None:
            return merge(layer, *args, **kwargs)
        merged_before = list(layer.merged_adapters)
        unmerged = vars(layer).get("unmerged") if merged_before else UnmergedBytes.copy_of(weight, _bias(layer))
        with _dequantized(layer, weight) as copies:
            result = merge(layer, *args, **kwargs)
        if layer.merged_adapters == merged_before:
            return result
        restorable = unmerged is not None and unmerged.belong_to(weight)
        without = weight.dequantize(torch.float32)
        try:
            _store(layer, copies)
        except ModelError:  # NaN, or a format that halfbyte cannot write
            layer.merged_adapters[:] = merged_before
            raise
        layer.unmerged = replace(unmerged, version=weight._version) if restorable else None
        update = copies[_weight_name(layer)].float() - without
        retained = RetainedUpdate.of(weight.dequantize(torch.float32), without, update)
        updates = _updates.get()
        if updates is None:
            _report_share([retained])
        else:
            updates.append(retained)
        return result

    return merge_quantized


def _unmerging(unmerge: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's `unmerge` that restores the stored bytes."""

    @functools.wraps(unmerge)
    @torch.no_grad()
    def unmerge_quantized(layer: Any, *args: Any, **kwargs: Any) -> Any:
        weight = quantized_weight(layer)
        if weight is None or not layer.merged:
            return unmerge(layer, *args, **kwargs)
        with _dequantized(layer, weight) as copies:
            result = unmerge(layer, *args, **kwargs)
        unmerged = vars(layer).pop("unmerged", None)
        if unmerged is not None and unmerged.belong_to(weight):
            unmerged.restore(_bias(layer))
        else:  # another layer has merged into the same weight since, or the model was copied
            _store(layer, copies)
            notice("unmerge-rounds", "unmerging subtracts from the merged weight and rounds: its stored bytes differ")
        return result

    return unmerge_quantized


def _reporting(merge_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's merge that reports the share of the update kept in all its layers."""

    @functools.wraps(merge_model)
    def merge_and_report(model: Any, *args: Any, **kwargs: Any) -> Any:
        updates: list[RetainedUpdate] = []
        token = _updates.set(updates)
        try:
            return merge_model(model, *args, **kwargs)
        finally:
            _updates.reset(token)
            _report_share(updates)

    return merge_and_report


def _report_share(updates: list[RetainedUpdate]) -> None:
    retained = RetainedUpdate.sum(updates)
    if retained.total:
        notice(
            "peft-merge",
            f"PEFT merged an adapter into quantized weights, in their format: {retained}. "
            "`halfbyte merge` merges into 16 bits, without this rounding",
        )


def _unloading(unload: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method by which PEFT unloads (IA)³, without its refusal of models that are marked as quantized."""

    @functools.wraps(unload)
    def unload_quantized(model: Any, *args: Any, **kwargs: Any) -> Any:
        weights = model.model.parameters()
        adapted = any(isinstance(weight, QuantizedTensor) for weight in weights)
        method = BaseTuner._unload_and_optionally_merge if adapted else unload
        return method(model, *args, **kwargs)

    return unload_quantized


for _name in ("merge_adapter", "_unload_and_optionally_merge"):
    setattr(BaseTuner, _name, _reporting(getattr(BaseTuner, _name)))
IA3Model._unload_and_optionally_merge = _unloading(IA3Model._unload_and_optionally_merge)  # type: ignore[method-assign]
