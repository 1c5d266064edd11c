"""Quantization-aware training of a loaded model: linear layers compute with rounded weights, then store those."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ..formats import Format, named, names
from ..layers import QuantizedLinear, quantized_parameter
from ..layers.plain import read_adapters
from ..modeling.architectures import expert_stacks, quantizable
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice
from .fake_quantize import merged_weight
from .layers import QATLinear, QATLoraLinear


def qat_format(scheme: str) -> Format:
    """The format that `qat_scheme` names; the same name in `halfbyte merge --quantize` stores it.

    Raises:
        ModelError: there is no such format, or it cannot be quantized to.
    """
    try:
        format_ = named(scheme)
    except ModelError as error:
        raise ModelError(f"qat_scheme: {error.message}", error.fix) from error
    if not type(format_).examples():
        raise ModelError(
            f"qat_scheme: {scheme} is only read from checkpoints", f"use one of {', '.join(sorted(names()))}"
        )
    return format_


def fake_quantize_linears(model: Any, format: Format) -> None:
    """Replace the linear layers that quantizing would store in `format` (not the head) by `QATLinear`, in place.

    Raises:
        ModelError: the model has none, or stacks of experts, or a weight has NaN or Inf, or a shape that the format
            cannot hold.
    """
    if stacks := expert_stacks(model):
        weights = sum(getattr(module, name.rpartition(".")[2]).numel() for name, module in stacks.items())
        said = f"{weights / 1e6:.0f}M weights of this model are stacked experts, which are not rounded in training"
        raise ModelError(f"qat_scheme: {said}", "remove qat_scheme, and store them in few bits: load_in_4bit: true")
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


def round_merged(model: nn.Module) -> None:
    """Have each LoRA on a `QATLinear` of `model` merged before rounding. Harmless on a model without any.

    Raises:
        ModelError: an adapter has no merged weight to round: dropout, DoRA, a bias, or another kind than LoRA.
    """
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "base_layer", None), QATLinear) or isinstance(module, QATLoraLinear):
            continue
        if obstacle := _obstacle(module):
            what, fix = obstacle
            raise ModelError(f"qat_scheme: no merged weight computes {name}: {what}", fix)
        module.__class__ = QATLoraLinear


def _obstacle(module: Any) -> tuple[str, str] | None:
    """What of an adapter cannot be merged in every forward, and the fix."""
    if type(module) is not LoraLinear:
        return f"its adapter is a {type(module).__name__}", "use plain LoRA"
    if any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.lora_dropout.values()):
        return "it has dropout on its adapter's input", "set lora_dropout: 0 (adapter_path: in adapter_config.json)"
    found = read_adapters(module, module.lora_A)
    return (found, "train one of plain LoRA") if isinstance(found, str) else None


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
