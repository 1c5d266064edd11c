"""QATLinear: quantization-aware training of a linear layer, by fake quantization."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from ..formats import Format
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
