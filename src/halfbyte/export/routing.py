"""Which experts tokens go to while two models are compared: rounding sends one to another expert now and then.

Such a token's logits jump by far more than rounding moves any other's. So where a token's experts are not those that
the other model chose, it takes the other's, with their weights, and is counted; all others are routed by the model
itself, whose routers are so compared, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.modeling.architectures import runs_experts

Choices = list[tuple[Tensor, Tensor]]  # experts int [T, k] and their weights [T, k], of each layer


@dataclass
class Routing:
    """What the tokens of one forward chose, layer by layer.

    Attributes:
        chosen: by the model that others are compared with, on the CPU.
        own: what tokens of the last forward inside `held` would have chosen, as `chosen`.
    """

    chosen: Choices = field(default_factory=list)
    own: Choices = field(default_factory=list)

    @property
    def choices(self) -> int:
        """Tokens times layers."""
        return sum(len(index) for index, _ in self.chosen)

    @contextlib.contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Around a forward of the model that others are compared with."""

        def note(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.chosen.append((inputs[1].cpu(), inputs[2].cpu()))

        self.chosen.clear()
        with _hooked(_experts(model), [note] * len(_experts(model))):
            yield

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Around a forward of another model on the same tokens."""

        def hold(layer: int, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights, *rest = inputs
            self.own.append((index.cpu(), weights.cpu()))
            theirs, their_weights = (each.to(index.device) for each in self.chosen[layer])
            other = _differ(index, theirs)[:, None]
            own = torch.where(other, theirs.to(index.dtype), index)
            return hidden, own, torch.where(other, their_weights.to(weights), weights), *rest

        self.own = []
        modules = _experts(model) if self.chosen else []
        with _hooked(modules, [partial(hold, layer) for layer in range(len(modules))]):
            yield


def moved(one: Choices, other: Choices) -> int:
    """How often a token chose otherwise, over all layers."""
    return sum(int(_differ(mine, theirs).sum()) for (mine, _), (theirs, _) in zip(one, other, strict=True))


def _differ(index: Tensor, other: Tensor) -> Tensor:
    """bool [T] of int [T, k], in any order."""
    return (index.sort(1).values != other.to(index.dtype).sort(1).values).any(1)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if runs_experts(module)]


@contextlib.contextmanager
def _hooked(modules: list[nn.Module], hooks: list[Any]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
