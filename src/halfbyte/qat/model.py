"""Quantization-aware training of a loaded model: linears that compute with rounded weights, and their conversion.

On a layer with LoRA, base and adapter are added first and their sum is rounded, since that sum is what merging and
quantizing deploys. PEFT would add the adapter's output to that of a rounded base. This is another function, whose
effective weight is not representable in the format.
"""

from __future__ import annotations

from typing import Any, Self

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..autograd.lora import LoRA
from ..formats import Format, named, names
from ..layers import QuantizedLinear, quantized_parameter
from ..layers.plain import factor_holders, read_adapters
from ..modeling.architectures import expert_stacks, quantizable
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice
from .fake_quantize import fake_quantized_linear, merged_weight


class QATLinear(nn.Linear):
    """`nn.Linear` that rounds its weight to a format in every forward; see `fake_quantize`.

    Weight and bias keep their dtype, names and gradients. The input is not rounded.

    Attributes:
        format: format to round the weight to.
    """

    format: Format

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: Format) -> Self:
        """The same layer with the same parameters."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = linear.in_features, linear.out_features
        module.format = format
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return fake_quantized_linear(input, self.weight, self.bias, self.format)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.spec}"


class MergeAwareLinear(QuantizedLinear):
    """`QuantizedLinear` whose adapter is added to the weight, and their sum rounded to its format, in every forward."""

    @property
    def format(self) -> Format:
        """The format of the weight, and of its sum with an adapter."""
        weight: Any = self.weight
        return weight.format


ROUNDED = (QATLinear, MergeAwareLinear)


class QATLoraLinear(LoraLinear):
    """PEFT's LoRA around one of `ROUNDED`; state dict, saving, merging and unloading are PEFT's own."""

    own_forward = "its weight is rounded with the adapter merged"

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("adapter_names") is not None:
            raise ModelError(
                "quantization-aware training does not support adapter_names", "use one adapter for the whole batch"
            )
        lora = self.active_lora()
        if lora is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()
        return fake_quantized_linear(x, base.weight, base.bias, base.format, lora)

    def active_lora(self) -> LoRA | None:
        """The adapter to merge in each forward; None if it is disabled or merged into the weight already.

        Raises:
            ModelError: several adapters are active, or the active one is not plain LoRA.
        """
        if self.disable_adapters or self.merged:
            return None
        adapters = read_adapters(self)
        if isinstance(adapters, str):
            raise ModelError(f"{adapters}: it has no merged weight to round", "use plain LoRA")
        if len(adapters) > 1:
            raise ModelError(
                f"{len(adapters)} adapters are active at once", "activate one: its sum with the weight is rounded"
            )
        return LoRA(adapters[0].a, adapters[0].b, adapters[0].scaling) if adapters else None


def qat_format(scheme: str) -> Format:
    """The format that `qat_scheme` names; `halfbyte merge --quantize` takes the same name.

    Raises:
        ModelError: there is no such format, or halfbyte cannot quantize to it.
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
    """Replace the linears that quantization would store in `format` (not the head) by `QATLinear`s, in place.

    Raises:
        ModelError: the model has no such linears or has stacked experts, or a weight has NaN, Inf or a shape that the
            format does not support.
    """
    if stacks := expert_stacks(model):
        weights = sum(getattr(module, name.rpartition(".")[2]).numel() for name, module in stacks.items())
        raise ModelError(
            f"qat_scheme: quantization-aware training does not support stacked experts ({weights / 1e6:.0f}M weights)",
            "remove qat_scheme; to store the experts in 4 bits, set load_in_4bit: true",
        )
    linears = quantizable(model)
    if not linears:
        raise ModelError(f"qat_scheme: {type(model).__name__} has no linear layer to quantize", "remove qat_scheme")
    for name, linear in linears.items():
        try:
            QuantizedTensor.quantize(linear.weight.detach(), format)  # fail here, where the error can name the layer
        except ModelError as error:
            raise ModelError(f"qat_scheme: {name}.weight: {error.message}", error.fix) from error
        model.set_submodule(name, QATLinear.from_linear(linear, format))
    notice(
        f"qat-{format.spec}",
        f"quantization-aware training: {len(linears)} linear layers round their weights to {format.spec} in every"
        " forward; activations, embeddings and the head are not rounded",
    )


def round_sums(model: Any) -> None:
    """Make the quantized linears of a model `MergeAwareLinear`s, in place.

    Raises:
        ModelError: the model has stacked experts, or a format that halfbyte only reads.
    """
    if expert_stacks(model, []):
        wrong = "merge_aware: adapters on stacked experts are not rounded with their weights"
        raise ModelError(wrong, "remove merge_aware")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    for name, linear in linears.items():
        format_: Format = linear.weight.format
        if type(linear) is not QuantizedLinear or not type(format_).examples():
            wrong = f"merge_aware: {name} is stored as {format_.spec}, which halfbyte only reads"
            raise ModelError(wrong, f"use one of {', '.join(sorted(names()))}")
        linear.__class__ = MergeAwareLinear
    message = f"merge-aware training: {len(linears)} quantized linear layers round their sum with the adapter"
    notice("merge-aware", f"{message} to their format in every forward, as `halfbyte merge` stores it")


def round_merged(model: nn.Module) -> None:
    """Turn each LoRA on one of `ROUNDED` into a `QATLoraLinear`, in place; does nothing on other models.

    Raises:
        ModelError: an adapter has no merged weight to round: it has dropout, DoRA or a bias, or is not LoRA.
    """
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        if not isinstance(base, ROUNDED) or isinstance(module, QATLoraLinear):
            continue
        if obstacle := _obstacle(module):
            reason, fix = obstacle
            key = "qat_scheme" if isinstance(base, QATLinear) else "merge_aware"
            raise ModelError(f"{key}: {name} has no merged weight to round: {reason}", fix)
        module.__class__ = QATLoraLinear


def _obstacle(module: Any) -> tuple[str, str] | None:
    """Why an adapter cannot be merged in every forward, and the fix; None if it can."""
    if type(module) is not LoraLinear:
        return f"its adapter is a {type(module).__name__}", "use plain LoRA"
    if any(isinstance(dropout, nn.Dropout) and dropout.p > 0 for dropout in module.lora_dropout.values()):
        return "it has dropout on its adapter's input", "set lora_dropout: 0 (adapter_path: in adapter_config.json)"
    adapters = read_adapters(module, factor_holders(module)[0])
    return (adapters, "use plain LoRA") if isinstance(adapters, str) else None


def quantize_trained(model: Any) -> None:
    """Replace each linear that is rounded, and its adapter, by a `QuantizedLinear` with the rounded merged weight.

    In place. A `MergeAwareLinear` without an adapter keeps its stored weight.

    Adapters on other modules do not change.
    """
    done = set()
    for name, module in list(model.named_modules()):  # an adapter precedes the layer that it wraps
        adapted = isinstance(module, QATLoraLinear)
        linear = module.get_base_layer() if adapted else module
        if not isinstance(linear, ROUNDED) or linear in done or not (adapted or isinstance(linear, QATLinear)):
            continue
        done.add(linear)
        weight = merged_weight(linear.weight, module.active_lora() if adapted else None)
        stored = QuantizedLinear.unfilled(linear)
        quantized = QuantizedTensor.quantize(weight, linear.format).to(linear.weight.dtype)
        stored.weight = quantized_parameter(quantized, linear.format)
        model.set_submodule(name, stored)
