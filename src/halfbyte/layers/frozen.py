"""Frozen float32 linears under adapters, multiplied by oneDNN where torch would have the slower MKL do it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..autograd.linear import frozen_linear
from ..utils.hardware import onednn_beats_mkl


class FrozenLinear(nn.Linear):
    """An `nn.Linear` whose weight gets no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type) or self.weight.requires_grad:
            return F.linear(input, self.weight, self.bias)
        return frozen_linear(input, self.weight, self.bias)


def multiply_by_onednn(model: nn.Module) -> int:
    """Have the linears under `model`'s adapters compute so, on a CPU where that is faster; their number.

    They become `FrozenLinear`s in place, so names, weights and adapters stay what they are.
    """
    if not onednn_beats_mkl():
        return 0
    found = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    plain = [base for base in found if type(base) is nn.Linear and "forward" not in vars(base) and _fits(base)]
    for base in plain:
        base.__class__ = FrozenLinear
    return len(plain)


def _fits(base: nn.Linear) -> bool:
    parameters = [parameter for parameter in (base.weight, base.bias) if parameter is not None]
    return all(each.is_cpu and each.dtype is torch.float32 and not each.requires_grad for each in parameters)
