"""LOMO and AdaLOMO of the package lomo_optim, in the interface that a training loop expects of an optimizer.

lomo_optim updates weights in hooks of the backward, and wants to run the backward itself (`fused_backward`). `Lomo`
does what `fused_backward` does around it: before the first gradient it sets the learning rate and counts the step, and
`step` updates the last weight, whose gradient is complete only after its hook.

Sources: Lv et al. 2023 (arXiv:2306.09782), Lv et al. 2023 (arXiv:2310.10195).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..utils.errors import CheckpointError
from .backward import weak_hook
from .parameters import closure_loss

MOMENTS = ("exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col")  # AdaLomo's attributes: name of a parameter → tensor
STEPS = "step_num"  # AdaLomo's number of steps
INNER = "lomo"  # key of a state dict


class Lomo(Optimizer):
    """Lomo or AdaLomo of lomo_optim.

    Args:
        model: all of its trained parameters are updated.
        groups: the trained parameters; the first group's learning rate is used.
        kind: lomo_optim's class.
        lr: learning rate.

    Attributes:
        inner: the optimizer of lomo_optim.
    """

    def __init__(self, model: nn.Module, groups: list[dict[str, Any]], cls: Callable[..., Any], lr: float):
        super().__init__(groups, {"lr": lr})
        self._begun = False
        self._squares: list[Tensor] = []
        before_update = weak_hook(self._before_update)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(before_update)  # hooks run in the order of registration
        self.inner = cls(model, lr=lr)
        self.inner.loss_scale = None  # AdaLomo divides gradients by it, as its own backward multiplies the loss by it

    def _before_update(self, gradient: Tensor) -> None:
        self._begin()
        self._squares.append(gradient.detach().float().square().sum())

    def _begin(self) -> None:
        """Set the learning rate and count the step, at the first gradient of a step."""
        if self._begun:
            return
        self._begun, self._squares = True, []
        self.inner.lr = float(self.param_groups[0]["lr"])
        if hasattr(self.inner, STEPS):
            setattr(self.inner, STEPS, getattr(self.inner, STEPS) + 1)

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of this step, fp32 []; a second call returns 0."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weight whose gradient came last; the backward has updated the others."""
        loss = closure_loss(closure)
        self._begin()
        self.inner.grad_func(0)
        self._begun = False
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, and AdaLomo's moments and number of steps under the key "lomo"."""
        moments = {name: dict(getattr(self.inner, name)) for name in MOMENTS if hasattr(self.inner, name)}
        return super().state_dict() | {INNER: moments | {STEPS: getattr(self.inner, STEPS, 0)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            CheckpointError: it is of another optimizer or model.
        """
        saved = state_dict.get(INNER)
        moments = {name: getattr(self.inner, name) for name in MOMENTS if hasattr(self.inner, name)}
        if saved is None or any(saved.get(name, {}).keys() != tensors.keys() for name, tensors in moments.items()):
            raise CheckpointError(
                "the saved state is not LOMO's of this model", "resume with the optimizer that saved it"
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != INNER})
        for name, tensors in moments.items():
            for key, tensor in tensors.items():
                tensor.copy_(saved[name][key])
        if hasattr(self.inner, STEPS):
            setattr(self.inner, STEPS, saved[STEPS])
