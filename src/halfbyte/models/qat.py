"""Quantization-aware training of a loaded model: linear layers compute with rounded weights, then store those."""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from ..formats import Format
from ..layers import QuantizedLinear, quantized_parameter
from ..notices import notice
from ..qat.adapter import QATLoraLinear
from ..qat.fake_quantize import merged_weight
from ..qat.layer import QATLinear
from ..tensor import QuantizedTensor
from .quantizer import quantizable


def fake_quantize_linears(model: Any, format: Format) -> None:
    """Replace the linear layers that quantizing would store in `format` (not the head) by `QATLinear`, in place.

    Raises:
        ModelError: the model has none, or a weight has NaN or Inf, or a shape that the format cannot hold.
    """
    linears = quantizable(model)
    if not linears:
        raise ModelError(f"qat_scheme: {type(model).__name__} has no linear layer to quantize", "remove qat_scheme")
    for name, linear in linears.items():
        try:
            QuantizedTensor.quantize(linear.weight.detach(), format)  # the first forward would not know the name
        except ModelError as error:
            raise ModelError(f"qat_scheme: {name}.weight: {error.message}", error.fix) from error
        model.set_submodule(name, QATLinear.from_linear(linear, format))
    notice(
        f"qat-{format.spec}",
        f"quantization-aware: {len(linears)} linear layers compute with weights rounded to {format.spec} in every"
        " forward; activations, embeddings and the head are not rounded",
    )


def quantize_trained(model: Any) -> None:
    """Replace each `QATLinear`, with the adapter on it, in place by a `QuantizedLinear` of what it computes with.

    Adapters on other modules stay.
    """
    done = set()
    for name, module in list(model.named_modules()):  # an adapter comes before the layer in it
        adapted = isinstance(module, QATLoraLinear)
        linear = module.get_base_layer() if adapted else module
        if not isinstance(linear, QATLinear) or linear in done:
            continue
        done.add(linear)
        weight = merged_weight(linear.weight, module.active_lora() if adapted else None)
        stored = QuantizedLinear.unfilled(linear)
        quantized = QuantizedTensor.quantize(weight, linear.format).to(linear.weight.dtype)
        stored.weight = quantized_parameter(quantized, linear.format)
        model.set_submodule(name, stored)
