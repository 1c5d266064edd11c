"""Linear8bitLt: LLM.int8() as a drop-in for `nn.Linear`, with the state dict of bitsandbytes' Linear8bitLt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..autograd.int8 import int8_linear
from ..formats import Format
from ..formats.int8 import Int8
from ..utils.errors import ModelError
from .quantized import QuantizedLinear


class Linear8bitLt(QuantizedLinear):
    """`QuantizedLinear` in int8 with an int8 GEMM.

    The forward quantizes inputs per row. The backward uses the dequantized weight. In training mode on a CPU the
    forward uses the dequantized weight too, as in bitsandbytes: the output error is half as large, since only the
    weight is rounded.

    Args:
        in_features, out_features, bias, device, dtype: as in `QuantizedLinear`.
        threshold: input columns with a magnitude of at least this are multiplied unquantized; 0: none.

    Raises:
        ModelError: the threshold is negative or not a number.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        threshold: float = 6.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias, format=Int8(), device=device, dtype=dtype)
        self.threshold = checked_threshold(threshold)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: Format | None = None, *, threshold: float = 6.0) -> Linear8bitLt:
        """The same layer with its weight in int8; the bias is shared."""
        module = super().from_linear(linear, format or Int8())
        module.threshold = checked_threshold(threshold)
        return module

    @classmethod
    def unfilled(cls, linear: nn.Linear) -> Linear8bitLt:
        module = super().unfilled(linear)
        module.threshold = 6.0
        return module

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self.weight.format, Int8):
            raise ModelError(
                f"a Linear8bitLt holds a weight in {self.weight.format.spec}", "use QuantizedLinear for it"
            )
        if self.training and input.device.type == "cpu":
            return super().forward(input)
        return int8_linear(input, self.weight, self.bias, self.threshold)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, threshold={self.threshold}"


def checked_threshold(threshold: float) -> float:
    if not threshold >= 0:
        raise ModelError(f"threshold is {threshold}", "use 0 (no outlier columns), or a positive magnitude such as 6")
    return float(threshold)
