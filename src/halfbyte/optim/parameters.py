"""Functions for optimizers of any rule: checks and properties of one parameter (its local shard, name, gradient, and
offset in the full parameter), and the loss of a step's closure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import ConfigError, TrainingError

FIRST_ELEMENT = "first_element"  # attribute of a slice of a parameter: number of its first element in the parameter
FULL_ELEMENTS = "full_elements"  # attribute of a slice of a parameter: elements of the parameter


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of `Optimizer.step` returns, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local_of(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def shard_groups(weight: Tensor) -> tuple[Any, ...]:
    """The process groups over which the elements of a DTensor are divided; () for other tensors."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return ()
    placements: Sequence[Any] = weight.placements  # type: ignore[attr-defined]
    sharded = [axis for axis, p in enumerate(placements) if not p.is_replicate() and mesh.size(axis) > 1]
    return tuple(mesh.get_group(axis) for axis in sharded)


def first_element(weight: Tensor) -> int:
    """Number of the first element of a slice, or of a DTensor's shard of rows, in the full parameter."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or not weight.dim():
        return getattr(weight, FIRST_ELEMENT, 0)
    placements: Sequence[Any] = weight.placements  # type: ignore[attr-defined]
    first_row = 0
    rows = weight.shape[0]
    for axis, placement in enumerate(placements):
        if placement.is_shard(0):
            width = -(-rows // mesh.size(axis))
            skipped = min(mesh.get_local_rank(axis) * width, rows)
            first_row += skipped
            rows = min(width, rows - skipped)
    return first_row * math.prod(weight.shape[1:])


def parameter_name(group: int, index: int) -> str:
    """Name of a parameter in error messages."""
    return f"parameter {index} of parameter group {group}"


def check_gradient(weight: Tensor, gradient: Tensor | None, name: str) -> None:
    """Raise a TrainingError if the gradient is sparse, or of another shape or device than its parameter `name`."""
    assert gradient is not None
    if gradient.layout is not torch.strided:
        wrong = f"the gradient of {name} has the layout {gradient.layout}"
        raise TrainingError(wrong, "use dense gradients, for example Embedding(sparse=False)")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise TrainingError(
            f"the gradient of {name} has shape {[*gradient.shape]} on {gradient.device}, and the parameter"
            f" {[*weight.shape]} on {weight.device}",
            "assign gradients of the parameter's shape and device, and call zero_grad() after changing a parameter",
        )


def check_unique(groups: Sequence[Mapping[str, Any]], added: Sequence[Any]) -> None:
    """Raise a ConfigError if an added parameter, or pair of name and parameter, is in the groups or added twice."""
    names: dict[int, str] = {}
    for number, members in enumerate((*(group["params"] for group in groups), added)):
        for index, member in enumerate(members):
            weight = member[1] if isinstance(member, tuple) else member
            name = parameter_name(number, index)
            if (first := names.setdefault(id(weight), name)) is not name:
                raise ConfigError(f"{name} is also {first}", "put each parameter into one group, once")
