"""How far a model's distributions are from its teacher's, through the heads of both and without full logits."""

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
from .head import Head, rows_at
from .layer import causal_lm_of


@dataclass(frozen=True)
class Teacher:
    """What a model learns from.

    Attributes:
        model: another causal LM of one vocabulary with it; or the model itself.
        forwards: around forwards that are the teacher's, such as with another adapter.
    """

    model: nn.Module
    forwards: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


_teachers: WeakKeyDictionary[nn.Module, Teacher] = WeakKeyDictionary()


@contextlib.contextmanager
def taught_by(model: nn.Module, teacher: Teacher) -> Iterator[None]:
    """Inside, `teacher_divergence` compares `model` with `teacher`."""
    _teachers[model] = teacher
    try:
        yield
    finally:
        del _teachers[model]


def teacher_divergence(
    model: nn.Module, inputs: Mapping[str, Any], at: Tensor, *, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """The generalised Jensen-Shannon divergence of a model from its teacher (arXiv:2306.13649, equation 1).

    Like `head.causal_lm_loss` it does not go through `model.forward`, and the heads compute nothing but the positions
    that are asked about.

    Args:
        model: inside `taught_by`.
        inputs: of both models; `input_ids` [B, T] and more.
        at: int64 [N], positions in the flattened [B·T] batch.
        beta, temperature: see `linear_generalized_jsd`.

    Returns:
        0-d fp32 sums over the N positions: of the divergence, differentiable, and of the model's entropy in nats.

    Raises:
        ModelError: nobody teaches `model`.
    """
    if model not in _teachers:
        raise ModelError("the model has no teacher here", "its divergence is known while it trains")
    teacher = _teachers[model]
    with torch.no_grad(), teacher.forwards():
        theirs, their_head = rows_at(teacher.model, inputs, at)
    own, own_head = rows_at(model, inputs, at)
    if own_head is None or their_head is None:
        logits = _logits(model, own, own_head)
        return _of_logits(logits, _logits(teacher.model, theirs, their_head), beta=beta, temperature=temperature)
    return linear_generalized_jsd(
        own,
        _weight(model),
        theirs,
        _weight(teacher.model),
        beta=beta,
        temperature=temperature,
        head=_numbers(own_head),
        teacher_head=_numbers(their_head),
    )


def _weight(model: nn.Module) -> Tensor:
    return causal_lm_of(model).get_output_embeddings().weight


def _numbers(head: Head) -> tuple[float, ...]:
    return (head.scale,) if head.softcap is None else (head.scale, head.softcap)


def _logits(model: nn.Module, rows: Tensor, head: Head | None) -> Tensor:
    """fp32 [N, V], from what `rows_at` gave."""
    if head is None:
        return rows.float()
    weight = _weight(model)
    return head(rows.to(weight.dtype) @ weight.T)


def _of_logits(logits: Tensor, theirs: Tensor, *, beta: float, temperature: float) -> tuple[Tensor, Tensor]:
    """As `linear_generalized_jsd`, of whole logits; the gradient comes from a sum that is 0."""
    with torch.no_grad():
        gradient, objective = logits.clone(), Objective(temperature=temperature)
        divergence, entropy = divergence_(gradient, theirs, (objective, objective), beta, True)
    return ((logits - logits.detach()) * gradient).sum() + divergence.sum(), entropy.sum()
