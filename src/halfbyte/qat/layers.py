"""Linear layers of quantization-aware training: they compute with their weight rounded to a format.

On a layer with LoRA, base and adapter are added first, and their sum is rounded, since that sum is what merging and
quantizing deploys. PEFT would add the adapter's output to that of a rounded base, which is another function: the sum of
the two lies between the values that the format has.
"""

from __future__ import annotations

from typing import Any, Self

from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..autograd.lora import LoRA
from ..formats import Format
from ..layers.plain import read_adapters
from ..utils.errors import ModelError
from .fake_quantize import fake_quantized_linear


class QATLinear(nn.Linear):
    """`nn.Linear` that computes with its weight rounded to a format, in every forward anew; see `fake_quantize`.

    Weight and bias stay what they were, in dtype, names and gradients; the input is not rounded.

    Attributes:
        format: what the weight is rounded to.
    """

    format: Format

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: Format) -> Self:
        """The same layer with the same parameters."""
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features, module.format = linear.in_features, linear.out_features, format
        module.weight, module.bias = linear.weight, linear.bias
        return module.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        return fake_quantized_linear(input, self.weight, self.bias, self.format)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.spec}"


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
