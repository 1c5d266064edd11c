"""LoRA on layers in quantization-aware training: base and adapter are added first, and their sum is rounded.

That sum is what merging and quantizing deploys. PEFT would add the adapter's output to that of a rounded base, which
is another function: the sum of the two lies between the values that the format has.
"""

from __future__ import annotations

from typing import Any, cast

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from halfbyte.autograd.lora import LoRA
from halfbyte.errors import ModelError
from halfbyte.qat.fake_quantize import fake_quantized_linear
from halfbyte.qat.layer import QATLinear


class QATLoraLinear(LoraLinear):
    """PEFT's LoRA around a `QATLinear`; state dict, saving, merging and unloading are PEFT's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("adapter_names") is not None:
            raise ModelError("a model in quantization-aware training takes one adapter for all rows of a batch")
        lora = self.active_lora()
        if lora is None:
            return super().forward(x, *args, **kwargs)
        base: Any = self.get_base_layer()
        return fake_quantized_linear(x, base.weight, base.bias, base.format, lora)

    def active_lora(self) -> LoRA | None:
        """What is merged in every forward; None where the adapter is off, or in the weight already.

        Raises:
            ModelError: several adapters are active.
        """
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return None
        if len(active) > 1:
            raise ModelError(f"{len(active)} adapters are active at once", "activate one: its sum with W is rounded")
        name = active[0]
        a, b = cast(Tensor, self.lora_A[name].weight), cast(Tensor, self.lora_B[name].weight)
        return LoRA(a, b, self.scaling[name])


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
            raise ModelError(f"qat_scheme: {name} has {what}, which no merged weight computes", fix)
        module.__class__ = QATLoraLinear


def _obstacle(module: Any) -> tuple[str, str] | None:
    """What of an adapter cannot be merged in every forward, and the fix."""
    if type(module) is not LoraLinear or module.lora_variant:
        kind = next((type(each).__name__ for each in module.lora_variant.values()), type(module).__name__)
        return f"an adapter of kind {kind}", "use plain LoRA"
    if any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.lora_dropout.values()):
        return "dropout on its adapter's input", "set lora_dropout: 0 (adapter_path: in adapter_config.json)"
    if any(module.lora_bias.values()):
        return "an adapter with a bias", "train one without lora_bias"
    return None
