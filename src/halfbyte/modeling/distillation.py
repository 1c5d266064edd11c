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
from ..ops.linear_head import HeadAdapter, head_logits
from ..utils.errors import ModelError
from .head import Head, head_terms, outputs_at
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
        teacher_terms = _terms(teacher.model, teacher_rows, teacher_head)
    student_rows, student_head = outputs_at(model, inputs, at)
    terms = _terms(model, student_rows, student_head)
    if student_head is None or teacher_head is None or terms is None or teacher_terms is None:
        logits = _logits(student_rows, student_head, terms)
        with torch.no_grad():
            gradient, objective = logits.clone(), Objective(temperature=temperature)
            teacher_logits = _logits(teacher_rows, teacher_head, teacher_terms)
            divergence, entropy = divergence_(gradient, teacher_logits, (objective, objective), beta, True)
        # the gradient comes from a term whose value is 0
        return ((logits - logits.detach()) * gradient).sum() + divergence.sum(), entropy.sum()
    weight, adapter = terms
    teacher_weight, teacher_adapter = teacher_terms
    return linear_generalized_jsd(
        student_rows,
        weight,
        teacher_rows,
        teacher_weight,
        beta=beta,
        temperature=temperature,
        head=_head_arguments(student_head),
        teacher_head=_head_arguments(teacher_head),
        adapter=adapter,
        teacher_adapter=teacher_adapter,
    )


def _head_arguments(head: Head) -> tuple[float, ...]:
    return (head.scale,) if head.softcap is None else (head.scale, head.softcap)


def _terms(model: nn.Module, rows: Tensor, head: Head | None) -> tuple[Tensor, HeadAdapter] | None:
    """Return the `head_terms` of a result of `outputs_at`, or None if it has logits."""
    return None if head is None else head_terms(causal_lm_of(model), rows)


def _logits(rows: Tensor, head: Head | None, terms: tuple[Tensor, HeadAdapter] | None) -> Tensor:
    """Return fp32 logits [N, V] from a result of `outputs_at` and its `_terms`."""
    if head is None or terms is None:
        return rows.float()
    weight, adapter = terms
    return head(head_logits(rows.to(weight.dtype), weight, adapter))
