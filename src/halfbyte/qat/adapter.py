"""LoRA on layers in quantization-aware training: base and adapter are added first, and their sum is rounded.

That sum is what merging and quantizing deploys. PEFT would add the adapter's output to that of a rounded base, which
is another function: the sum of the two lies between the values that the format has.
"""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from halfbyte.autograd.lora import LoRA
from halfbyte.errors import ModelError
from halfbyte.layers.plain import read_adapters
from halfbyte.qat.fake_quantize import fake_quantized_linear
from halfbyte.qat.layer import QATLinear


class QATLoraLinear(LoraLinear):
    """PEFT's LoRA around a `QATLinear`; state dict, saving, merging and unloading are PEFT's own."""

    own_forward = "its weight is rounded with the adapter merged"

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
            ModelError: several adapters are active, or the one that is has no merged weight.
        """
        if self.disable_adapters or self.merged:
            return None
        found = read_adapters(self)
        if isinstance(found, str):
            raise ModelError(f"{found}: no merged weight computes that", "use plain LoRA")
        if len(found) > 1:
            raise ModelError(f"{len(found)} adapters are active at once", "activate one: its sum with W is rounded")
        return LoRA(found[0].a, found[0].b, found[0].scaling) if found else None


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
