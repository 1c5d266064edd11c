"""LARS of bitsandbytes, with 8- or 32-bit state, and a reference in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ...optim.parameters import closure_loss
from .optimizer import Optimizer1State, refuse


class LARS(Optimizer1State):
    """SGD with momentum (You et al. 2017, arXiv:1708.03888), its update clipped to `max_unorm` times the weight's norm.

    `optim_bits` chooses the state; 8-bit updates are not clipped.

    Raises:
        NotImplementedError: `momentum` is 0.
        ValueError: `dampening` or `nesterov` is set: bitsandbytes ignores them.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 0.02,
    ):
        if momentum == 0:
            raise NotImplementedError("LARS without momentum is not supported")
        refuse(type(self).__name__, dampening=dampening != 0, nesterov=nesterov)
        betas = momentum, dampening
        super().__init__("lars", params, lr, betas, 0.0, weight_decay, optim_bits, args, min_8bit_size, max_unorm)


class LARS8bit(LARS, bits=8):
    """LARS with 8-bit state."""


class LARS32bit(LARS, bits=32):
    """LARS with fp32 state."""


class PytorchLARS(Optimizer):
    """LARS with torch operations; arguments as in bitsandbytes.

    Raises:
        ValueError: a number is negative, or `nesterov` is set without momentum or with dampening.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        max_unorm: float = 0.02,
    ):
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for key, value in options.items():
            if value < 0:
                raise ValueError(f"{key} must not be negative: {value}")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("nesterov needs momentum and no dampening")
        super().__init__(params, options | {"dampening": dampening, "nesterov": nesterov, "max_unorm": max_unorm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure_loss(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight)
        return loss

    def _step(self, group: dict[str, Any], weight: torch.Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.add(weight, alpha=group["weight_decay"])
        state, update = self.state[weight], gradient
        if group["momentum"]:
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
            else:
                state["momentum_buffer"] = gradient.clone()
            buffer = state["momentum_buffer"]
            update = gradient + group["momentum"] * buffer if group["nesterov"] else buffer
        max_norm, norm = group["max_unorm"] * weight.norm(), update.norm()
        factor = torch.where((norm > max_norm) & (max_norm > 0), max_norm / norm, torch.ones_like(norm))
        weight.sub_(group["lr"] * factor * update)
