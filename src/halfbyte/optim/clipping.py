"""Gradient clipping without a pass of its own: which gradients the factor of `FusedOptimizer.clip` belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.notices import notice
from .launches import Addresses, StepTensors
from .parameters import local_of


class ClippedGradients:
    """Gradients that `FusedOptimizer.clip` has read, to detect changes before the step.

    A gradient has changed if its address or version is another one. The references keep addresses from being used
    again; the Python objects are not compared, since in a compiled graph two of them may be one tensor.

    Args:
        gradients: of all parameters.
        addresses: of the weights and of these gradients.
    """

    def __init__(self, gradients: Sequence[Tensor | None], addresses: Addresses):
        self.gradients = gradients
        self.addresses = addresses
        self._versions = versions_of(gradients)

    def match(self, tensors: StepTensors) -> bool:
        """Whether `tensors` are the same gradients, unchanged, of weights at the same addresses."""
        return versions_of(tensors.gradients) == self._versions and Addresses.of(*tensors) == self.addresses

    def unchanged(self, gradients: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of the gradients that were read and have not changed."""
        current = [*zip(Addresses.of((), gradients).gradients, versions_of(gradients), strict=True)]
        clipped = [*zip(self.addresses.gradients, self._versions, strict=True)]
        return [n for n, (a, b) in enumerate(zip(current, clipped, strict=False)) if a == b and a[1] >= 0]


@dataclass
class Clipping:
    """Result of `clip` for the next step, in an object: torch.compile ignores assignments to an optimizer's attributes.

    Attributes:
        factor: fp32 []: of the gradients; None: 1.
        gradients: the gradients that the factor was computed from; None: there are none.
    """

    factor: Tensor | None = None
    gradients: ClippedGradients | None = None


def clip_unchanged(
    clipped: ClippedGradients, factor: Tensor | None, tensors: StepTensors, is_compiled: bool
) -> tuple[Tensor | None, StepTensors]:
    """Return the factor that a step multiplies all gradients by, and the weights and gradients that it takes.

    If `clip` has read all gradients, the step multiplies them. Otherwise the ones that it has read are multiplied here,
    in place or, in a compiled graph, as copies, and the factor is None.

    Args:
        factor: of the gradients that `clip` has read.
        tensors: weights and gradients of this step.
    """
    weights, gradients = tensors
    unchanged = clipped.unchanged(gradients)
    unclipped = {number for number, gradient in enumerate(gradients) if gradient is not None} - {*unchanged}
    if factor is None or not unclipped:
        return factor, tensors
    former = {*map(id, clipped.gradients)} - {id(None)}
    if not is_compiled and any(id(gradients[number]) in former for number in unclipped):
        notice(
            "changed-after-clip",
            "gradients were changed in place between clip() and step(): they are stepped as they are now, unclipped."
            " Call clip() after the last change",
        )
    if is_compiled:
        chosen = {*unchanged}
        gradients = [g.clone() if g is not None and number in chosen else g for number, g in enumerate(gradients)]
    multiply([gradients[number] for number in unchanged], factor)
    return None, StepTensors(weights, gradients)


def multiply(gradients: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by a factor, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            by_device.setdefault(gradient.device, []).append(local_of(gradient))
    for device, shards in by_device.items():
        torch._foreach_mul_(shards, factor.to(device))


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place; -1 for None."""
    try:
        return [-1 if t is None else t._version for t in tensors]
    except RuntimeError:  # a tensor of torch's inference mode, which has no version
        return [-1 if t is None else 0 if t.is_inference() else t._version for t in tensors]
