"""Optimizer steps under torch.compile: one opaque op for all parameters, and one for clipping.

A graph has the number of its optimizer as a constant, and weights and gradients as inputs. When the op runs, it finds
the optimizer by this number and does what an eager step does. So learning rates, other options and the state are read
at run time: they are no inputs of the graph, and a change of them does not compile it again.

The ops write to the weights that they are given. These are the parameters themselves in "eager" and in Inductor, which
updates in place, and copies in backends that remove mutations, such as "aot_eager".
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..utils.errors import TrainingError
from .launches import ParameterSet, StepTensors
from .parameters import local_of


class CompiledOptimizer(Protocol):
    """The interface of `FusedOptimizer` that the ops call."""

    param_groups: list[dict[str, Any]]
    all_parameters: ParameterSet

    def read_norm(self, max_norm: float, tensors: StepTensors | None = None) -> tuple[Tensor, Tensor | None]: ...
    def update(
        self, factor: Tensor | None, scale: Tensor | None, found_inf: Tensor | None, tensors: StepTensors | None = None
    ) -> None: ...


_numbers = itertools.count()
_optimizers: weakref.WeakValueDictionary[int, CompiledOptimizer] = weakref.WeakValueDictionary()

# CUDA graphs of torch.compile must not hold the ops: they read learning rates on the host.
_TAGS = (torch.Tag.cudagraph_unsafe,)


def register(optimizer: CompiledOptimizer) -> int:
    """Return a number by which the ops find the optimizer while it is alive."""
    number = next(_numbers)
    _optimizers[number] = optimizer
    return number


def _optimizer(number: int, weights: Sequence[Tensor]) -> CompiledOptimizer:
    """Return the optimizer of a graph, or raise a TrainingError if its number of parameters has changed."""
    optimizer = _optimizers.get(number)
    if optimizer is None or sum(len(group["params"]) for group in optimizer.param_groups) != len(weights):
        raise TrainingError(
            "a compiled optimizer step runs after its optimizer was replaced", "compile the new optimizer's step"
        )
    return optimizer


@torch.library.custom_op("halfbyte::optimizer_step", mutates_args=("weights",), tags=_TAGS)
def opaque_step(
    number: int,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    factor: Tensor | None,
    scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Update the weights; see `FusedOptimizer.update`."""
    optimizer = _optimizer(number, weights)
    optimizer.update(factor, scale, found_inf, StepTensors(weights, gradients))
    parameters = (local_of(weight) for group in optimizer.param_groups for weight in group["params"])
    if any(weight.data_ptr() != p.data_ptr() for weight, p in zip(weights, parameters, strict=True)):
        optimizer.all_parameters.forget()  # copies, whose memory is freed after the graph


opaque_step.register_fake(lambda number, weights, gradients, factor, scale, found_inf: None)


@torch.library.custom_op("halfbyte::optimizer_clip", mutates_args=(), tags=_TAGS)
def opaque_clip(number: int, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], max_norm: float) -> Tensor:
    """Return the norm of the gradients and the factor that clips them to `max_norm`, fp32 [2]."""
    norm, factor = _optimizer(number, weights).read_norm(max_norm, StepTensors(weights, gradients))
    return torch.stack([norm, torch.ones_like(norm) if factor is None else factor])


@opaque_clip.register_fake
def _(number: int, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], max_norm: float) -> Tensor:
    device = next((gradient.device for gradient in gradients if gradient is not None), torch.device("cpu"))
    return torch.empty(2, device=device)
