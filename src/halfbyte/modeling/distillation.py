"""Divergence between a model's and its teacher's distributions, through both heads and without full logits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..autograd.losses import linear_generalized_jsd
from ..ops.cross_entropy import Objective
from ..ops.divergence import divergence_
from ..utils.errors import ModelError
from .head import Head, head_weight, outputs_at
from .layer import causal_lm_of


@dataclass(frozen=True)
class Teacher:
    """A teacher model for distillation.

    Attributes:
        model: another causal LM with the same vocabulary, or the student itself.
        forwards: context for the teacher's forwards, such as one that selects another adapter.
    """

    model: nn.Module
    forwards: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


_teachers: WeakKeyDictionary[nn.Module, Teacher] = WeakKeyDictionary()


@contextlib.contextmanager
def use_teacher(model: nn.Module, teacher: Teacher) -> Iterator[None]:
    """Set the teacher that `teacher_divergence` uses for `model` inside the context."""
    _teachers[model] = teacher
    try:
        yield
    finally:
        del _teachers[model]


def teacher_divergence(
    model: nn.Module, inputs: Mapping[str, Any], at: Tensor, *, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the generalised Jensen-Shannon divergence from the teacher (arXiv:2306.13649, equation 1).

    Like `head.causal_lm_loss`, it does not run `model.forward`, and the heads compute only the selected positions.

    Args:
        model: a model inside `use_teacher`.
        inputs: inputs of both models: `input_ids` [B, T] and more.
        at: int64 [N], positions in the flattened [B·T] batch.
        beta, temperature: see `linear_generalized_jsd`.

    Returns:
        0-d fp32 sums over the N positions: the divergence, differentiable, and the student's entropy in nats.

    Raises:
        ModelError: `model` has no teacher.
    """
    if model not in _teachers:
        raise ModelError("the model has no teacher here", "call teacher_divergence inside use_teacher")
    teacher = _teachers[model]
    with torch.no_grad(), teacher.forwards():
        teacher_rows, teacher_head = outputs_at(teacher.model, inputs, at)
    student_rows, student_head = outputs_at(model, inputs, at)
    if student_head is None or teacher_head is None:
        logits = _logits(model, student_rows, student_head)
        with torch.no_grad():
            gradient, objective = logits.clone(), Objective(temperature=temperature)
            teacher_logits = _logits(teacher.model, teacher_rows, teacher_head)
            divergence, entropy = divergence_(gradient, teacher_logits, (objective, objective), beta, True)
        # the gradient comes from a term whose value is 0
        return ((logits - logits.detach()) * gradient).sum() + divergence.sum(), entropy.sum()
    return linear_generalized_jsd(
        student_rows,
        _weight(model),
        teacher_rows,
        _weight(teacher.model),
        beta=beta,
        temperature=temperature,
        head=_head_arguments(student_head),
        teacher_head=_head_arguments(teacher_head),
    )


def _weight(model: nn.Module) -> Tensor:
    return head_weight(causal_lm_of(model))


def _head_arguments(head: Head) -> tuple[float, ...]:
    return (head.scale,) if head.softcap is None else (head.scale, head.softcap)


def _logits(model: nn.Module, rows: Tensor, head: Head | None) -> Tensor:
    """Return fp32 logits [N, V] from a result of `outputs_at`."""
    if head is None:
        return rows.float()
    weight = _weight(model)
    return head(rows.to(weight.dtype) @ weight.T)
