"""Update parameters in the backward: hooks on their gradients, and the check that stops a step at a broken one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import TrainingError
from .launches import ParameterSet, SteppedOptimizer
from .parameters import local_of


class BackwardCheck:
    """Norms of the gradients of a step whose backward updates parameters, and a flag on the device that stops it.

    The flag is set by the first gradient with NaN or Inf and stays set until the step ends, so that the backward
    updates no parameter after it.

    Args:
        optimizer: its attribute `found_inf`, if it has one that is not None, sets the flag before the first gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | SteppedOptimizer):
        self.optimizer = optimizer
        self._norms: dict[int, tuple[Sequence[Tensor], Tensor]] = {}  # by the key of `add`, in the order of its calls
        self._found_inf: Tensor | None = None  # None: no gradient of this step is checked yet
        self._is_read = False  # whether `gradient_norm` has returned the norm of `_norms`

    def add(self, key: int, weights: Sequence[Tensor]) -> Tensor:
        """Check the gradients of some weights; returns the flag, fp32 []: 1 if this step must update nothing more.

        Args:
            key: of these weights; a second call in a step replaces their norms.
            weights: on one or several devices, in the order in which their gradients were complete.
        """
        flag = self._found_inf
        if flag is None:
            self._norms = {}
            flag = getattr(self.optimizer, "found_inf", None)
        gradients = [local_of(weight.grad).contiguous() for weight in weights if weight.grad is not None]
        wide = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
        by_weight = torch._foreach_norm(gradients, dtype=wide)  # one pass with few launches; inf if it overflows
        norms = torch.stack([norm.to(gradients[0].device, torch.float32) for norm in by_weight])
        broken = (~norms.isfinite().all()).float()
        flag = broken if flag is None else torch.maximum(flag.to(broken).reshape(()), broken)
        self._norms[key] = weights, norms
        self._found_inf = flag
        self._is_read = False
        return flag

    def end_step(self) -> None:
        """Clear the flag."""
        self._found_inf = None

    def gradient_norm(self) -> Tensor:
        """Norm of all gradients of the last backward, fp32 []; 0 before the first, and in a second call."""
        is_read = self._is_read
        self._is_read = True
        if is_read or not self._norms:
            return torch.zeros(())
        norms = [norms for _, norms in self._norms.values()]
        return torch.linalg.vector_norm(torch.cat([n.to(norms[0].device) for n in norms]))

    def first_broken(self) -> Tensor | None:
        """Return the first weight of this step whose gradient has NaN or Inf, or None. Blocks the host."""
        for weights, norms in self._norms.values():
            for weight, is_finite in zip(weights, norms.isfinite().tolist(), strict=True):
                if not is_finite:
                    return weight
        return None


class BackwardUpdates:
    """Updates lists of an optimizer's parameters in the backward when their gradients are complete, and frees these.

    A list whose gradients have NaN or Inf is not changed, nor are the lists after it in the same step; see
    `BackwardCheck`.

    Args:
        optimizer: its `step` must do nothing but call `finish`.
        parameter_lists: the optimizer's parameters, divided in the order in which their gradients are expected.

    Raises:
        TrainingError: in a backward, if a gradient is complete for the second time since the last `finish`.
    """

    def __init__(self, optimizer: SteppedOptimizer, parameter_lists: Sequence[Sequence[Tensor]]):
        self.optimizer = optimizer
        self.parameter_lists = [[*parameters] for parameters in parameter_lists]
        self.check = BackwardCheck(optimizer)
        # of each list: id of a weight with a complete gradient in this step → its number in the order of arrival
        self._arrived: list[dict[int, int]] = [{} for _ in parameter_lists]
        self.reset()
        arrive = weak_hook(self.arrive)
        self._hooks = [
            weight.register_post_accumulate_grad_hook(partial(arrive, number))
            for number, parameters in enumerate(parameter_lists)
            for weight in parameters
        ]

    def reset(self) -> None:
        """Divide the parameters into launches again."""
        self.sets = [ParameterSet(self.optimizer, {*map(id, parameters)}) for parameters in self.parameter_lists]

    def close(self) -> None:
        """Stop updating in the backward."""
        for hook in self._hooks:
            hook.remove()

    def arrive(self, number: int, weight: Tensor) -> None:
        """Take the complete gradient of a weight of list `number`; update the list after its last gradient."""
        arrived = self._arrived[number]
        if id(weight) in arrived:
            raise second_backward(weight)
        arrived[id(weight)] = len(arrived)
        if len(arrived) == len(self.parameter_lists[number]):
            self._update(number)

    @torch.no_grad()
    def _update(self, number: int) -> None:
        flag = self._check(number)
        following = self.sets[number + 1] if number + 1 < len(self.sets) else None
        self.sets[number].step(None, flag, following)
        self.sets[number].free_gradients()

    def _check(self, number: int) -> Tensor:
        """Read and check the gradients that a list has now; returns the flag that stops the step."""
        self.sets[number].read()
        order = self._arrived[number]
        present = [weight for weight in self.parameter_lists[number] if weight.grad is not None]
        return self.check.add(number, sorted(present, key=lambda weight: order.get(id(weight), len(order))))

    def _incomplete(self) -> list[int]:
        """Numbers of the lists of which only some parameters have a gradient."""
        return [
            number
            for number, (arrived, parameters) in enumerate(zip(self._arrived, self.parameter_lists, strict=True))
            if 0 < len(arrived) < len(parameters) and any(weight.grad is not None for weight in parameters)
        ]

    def finish(self) -> None:
        """End a step: update the lists of which only some parameters have a gradient."""
        for number in self._incomplete():
            self._update(number)
        for arrived in self._arrived:
            arrived.clear()
        self.check.end_step()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Norm of all gradients of the last backward, fp32 []; 0 before the first, and in a second call.

        Gradients that `finish` will use are checked before, so that one with NaN or Inf stops all of them.
        """
        for number in self._incomplete():
            self._check(number)
        return self.check.gradient_norm()


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method while its object lives, and does not keep it alive.

    Python's garbage collector does not look into hooks of tensors: an optimizer that a hook refers to would never be
    freed, and neither would the weights.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := reference()) is not None:
            alive(*arguments)

    return call


def second_backward(weight: Tensor) -> TrainingError:
    """Error for a gradient that arrives after the backward has updated its parameter in the same step."""
    return TrainingError(
        f"a second backward before step() gives a gradient to a parameter of shape {[*weight.shape]} that the first one"
        " has updated",
        "call step() after every backward, or do not update in the backward to accumulate gradients",
    )
