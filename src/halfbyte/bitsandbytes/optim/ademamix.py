"""AdEMAMix of bitsandbytes, with 8- or 32-bit state, resident or paged, and a reference in torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from ...ops.optimizer import scheduled_beta3
from ...optim.parameters import closure_loss
from .optimizer import Optimizer2State


class _ReferenceAdEMAMix(Optimizer):
    """AdEMAMix (arXiv:2409.03137, algorithm 1) with torch operations; state `m1_m2` [2, …] and `nu`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        t_beta3: int | None = None,
        t_alpha: int | None = None,
    ):
        schedule = {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} | schedule)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure_loss(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight)
        return loss

    def _step(self, group: dict[str, Any], weight: torch.Tensor) -> None:
        state, (beta1, beta2, beta3) = self.state[weight], group["betas"]
        if not state:
            state["step"] = 0
            state["m1_m2"] = weight.new_zeros((2, *weight.shape))
            state["nu"] = torch.zeros_like(weight)
        state["step"] += 1
        step, alpha = state["step"], group["alpha"]
        if group["t_alpha"]:
            alpha *= min(step / group["t_alpha"], 1.0)
        numbers = (
            torch.tensor(float(number), dtype=torch.float64) for number in (step, beta1, beta3, group["t_beta3"] or 0)
        )
        slow_rate = float(scheduled_beta3(*numbers))
        fast, slow = state["m1_m2"]
        assert weight.grad is not None
        fast.lerp_(weight.grad, 1 - beta1)
        slow.mul_(slow_rate).add_(weight.grad, alpha=1 - slow_rate)
        state["nu"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        root = state["nu"].sqrt() / (1 - beta2**step) ** 0.5 + group["eps"]
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(group["lr"] * (fast / (1 - beta1**step) + alpha * slow) / root)


class AdEMAMix(Optimizer2State):
    """AdEMAMix; `optim_bits` chooses the state."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: int = 32,
        min_8bit_size: int = 4096,
        is_paged: bool = False,
    ):
        super().__init__(
            "ademamix", params, lr, betas, eps, weight_decay, optim_bits, None, min_8bit_size, is_paged=is_paged,
            alpha=alpha, t_alpha=t_alpha, t_beta3=t_beta3,
        )  # fmt: skip


class AdEMAMix8bit(AdEMAMix, bits=8):
    """AdEMAMix with 8-bit state."""


class AdEMAMix32bit(AdEMAMix, bits=32):
    """AdEMAMix with fp32 state."""


class PagedAdEMAMix(AdEMAMix, paged=True):
    """AdEMAMix with state in host memory."""


class PagedAdEMAMix8bit(AdEMAMix8bit, paged=True):
    """AdEMAMix with 8-bit state in host memory."""


class PagedAdEMAMix32bit(AdEMAMix32bit, paged=True):
    """AdEMAMix with fp32 state in host memory."""
