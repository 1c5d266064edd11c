"""Gradient clipping without a pass of its own: which gradients the factor of `FusedOptimizer.clip` belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..utils.notices import notice
from .parts import Tensors, Values, local_of


class ClippedGradients:
    """Gradients that `FusedOptimizer.clip` has read, to detect changes before the step.

    A gradient has changed if its address or version is another one. The references keep addresses from being used
    again; the Python objects are not compared, since in a compiled graph two of them may be one tensor.

    Args:
        gradients: of all parameters.
        tensors: addresses of the weights and of these gradients.
    """

    def __init__(self, gradients: Sequence[Tensor | None], tensors: Tensors):
        self.gradients, self.tensors = gradients, tensors
        self._versions = versions_of(gradients)

    def are(self, values: Values) -> bool:
        """Whether `values` are the same gradients, unchanged, of weights at the same addresses."""
        return versions_of(values.gradients) == self._versions and Tensors.of(*values) == self.tensors

    def unchanged(self, gradients: Sequence[Tensor | None]) -> list[int]:
        """Return the positions of the gradients that were read and have not changed."""
        addresses = Tensors.of((), gradients).gradients
        now = [*zip(addresses, versions_of(gradients), strict=True)]
        read = [*zip(self.tensors.gradients, self._versions, strict=True)]
        return [at for at, (one, other) in enumerate(zip(now, read, strict=False)) if one == other and one[1] >= 0]


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
    clipped: ClippedGradients, factor: Tensor | None, values: Values, is_compiled: bool
) -> tuple[Tensor | None, Values]:
    """Return the factor that a step multiplies all gradients by, and the weights and gradients that it takes.

    If `clip` has read all gradients, the step multiplies them. Otherwise the ones that it has read are multiplied here,
    in place or, in a compiled graph, as copies, and the factor is None.

    Args:
        factor: of the gradients that `clip` has read.
        values: weights and gradients of this step.
    """
    weights, gradients = values
    unchanged = clipped.unchanged(gradients)
    unclipped = {at for at, gradient in enumerate(gradients) if gradient is not None} - {*unchanged}
    if factor is None or not unclipped:
        return factor, values
    former = {*map(id, clipped.gradients)} - {id(None)}
    if not is_compiled and any(id(gradients[at]) in former for at in unclipped):
        notice(
            "changed-after-clip",
            "gradients were changed in place between clip() and step(): they are stepped as they are now, unclipped."
            " Call clip() after the last change",
        )
    if is_compiled:
        chosen = {*unchanged}
        gradients = [each.clone() if each is not None and at in chosen else each for at, each in enumerate(gradients)]
    multiply([gradients[at] for at in unchanged], factor)
    return None, Values(weights, gradients)


def multiply(gradients: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiply gradients by a factor, in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient is not None:
            by_device.setdefault(gradient.device, []).append(local_of(gradient))
    for device, some in by_device.items():
        torch._foreach_mul_(some, factor.to(device))


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return how often each tensor was changed in place; -1 for None."""
    try:
        return [-1 if each is None else each._version for each in tensors]
    except RuntimeError:  # a tensor of torch's inference mode, which has no version
        return [-1 if each is None else 0 if each.is_inference() else each._version for each in tensors]
