"""PEFT's tuner layers on quantized weights: merging, unmerging, and PEFT's interface for quantized base weights.

`layers.quantized` calls `adapt_class` when PEFT puts a tuner layer on a quantized weight, in any program. PEFT's merges
then compute with the dequantized weight in fp32, and the sum is stored again in the weight's format. Unmerging restores
the stored bytes, of which merging keeps a copy in host memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.quantization_utils import QuantizationBackend
from torch import Tensor, nn

from ..formats.retained_update import RetainedUpdate
from ..tensor import QuantizedTensor
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
class UnmergedWeight:
    """The bytes of a quantized weight, and of its layer's bias, before a merge.

    Attributes:
        parts: copies of the parts of the weight, on the host.
        bias: a copy of the bias, which some merges scale; None if there is none.
        weight: the parameter.
        version: its version after the merge. Any other write to the parameter increments it.
    """

    parts: dict[str, Tensor]
    bias: Tensor | None
    weight: QuantizedTensor
    version: int

    @classmethod
    def copy_of(cls, weight: QuantizedTensor, layer: Any) -> UnmergedWeight:
        """Copy the bytes of `weight` and of the bias of the base layer of `layer`."""
        parts = {name: stored.to("cpu", copy=True) for name, stored in weight.parts.items()}
        bias = getattr(layer.get_base_layer(), "bias", None)
        return cls(parts, None if bias is None else bias.to("cpu", copy=True), weight, weight._version)

    def belongs_to(self, weight: QuantizedTensor) -> bool:
        """Return whether nothing else has been written to `weight` since the merge."""
        return weight is self.weight and weight._version == self.version

    def restore(self, layer: Any) -> None:
        """Write the bytes back."""
        for name, stored in self.weight.parts.items():
            stored.copy_(self.parts[name])
        if self.bias is not None:
            layer.get_base_layer().bias.copy_(self.bias)


def quantized_weight(layer: Any) -> QuantizedTensor | None:
    """Return the base weight that a tuner layer adapts if it is quantized."""
    weight = getattr(layer.get_base_layer(), _weight_name(layer), None)
    return weight if isinstance(weight, QuantizedTensor) else None


def adapt_class(cls: type) -> None:
    """Make the tuner layers of PEFT's class `cls` merge into quantized weights; other base weights are not affected."""
    if not issubclass(cls, BaseTunerLayer) or "quantization_backend" in vars(cls):
        return
    cls.quantization_backend = property(_backend, _set_backend)  # type: ignore[assignment]
    for name, wrap in (("merge", _merging), ("unmerge", _unmerging)):
        if hasattr(cls, name):
            setattr(cls, name, wrap(getattr(cls, name)))


def _backend(layer: Any) -> QuantizationBackend | None:
    return BACKEND if quantized_weight(layer) is not None else vars(layer).get("_backend")


def _set_backend(layer: Any, backend: QuantizationBackend | None) -> None:
    vars(layer)["_backend"] = backend  # of another library's weights


def _weight_name(layer: Any) -> str:
    return getattr(layer, "parameter_name", "weight")  # of PEFT's ParamWrapper


@contextlib.contextmanager
def _dequantized(layer: Any, weight: QuantizedTensor) -> Iterator[nn.Parameter]:
    """Within the context, the base layer has `weight` dequantized in fp32, or fp64."""
    base, name = layer.get_base_layer(), _weight_name(layer)
    values = nn.Parameter(weight.dequantize(torch.promote_types(weight.dtype, torch.float32)), requires_grad=False)
    setattr(base, name, values)
    try:
        yield values
    finally:
        setattr(base, name, weight)


def _merging(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's `merge` that stores the merged weight in the format of the base weight."""

    @functools.wraps(merge)
    @torch.no_grad()
    def merge_quantized(layer: Any, *args: Any, **kwargs: Any) -> Any:
        weight = quantized_weight(layer)
        if weight is None:
            return merge(layer, *args, **kwargs)
        merged_before = list(layer.merged_adapters)
        unmerged = vars(layer).get("unmerged_weight") if merged_before else UnmergedWeight.copy_of(weight, layer)
        with _dequantized(layer, weight) as values:
            result = merge(layer, *args, **kwargs)
        if layer.merged_adapters == merged_before:
            return result
        restorable = unmerged is not None and unmerged.belongs_to(weight)
        without = weight.dequantize(torch.float32)
        weight.copy_(values)
        layer.unmerged_weight = replace(unmerged, version=weight._version) if restorable else None
        updates = _updates.get()
        update = RetainedUpdate.of(weight.dequantize(torch.float32), without, values.float() - without)
        if updates is None:
            _report_share([update])
        else:
            updates.append(update)
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
        with _dequantized(layer, weight) as values:
            result = unmerge(layer, *args, **kwargs)
        unmerged = vars(layer).pop("unmerged_weight", None)
        if unmerged is not None and unmerged.belongs_to(weight):
            unmerged.restore(layer)
        else:  # another layer has merged into the same weight since, or the model was copied
            weight.copy_(values)
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


for _name in ("merge_adapter", "_unload_and_optionally_merge"):
    setattr(BaseTuner, _name, _reporting(getattr(BaseTuner, _name)))
