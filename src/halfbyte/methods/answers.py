"""Log-probabilities of the answers in a batch, of the policy and of its reference.

A batch that `data.paired` makes holds the model's inputs and, for M trained tokens of N answers known on the host:
`at`, `wanted` and `answer` [M] (the position before each, the token, and whose answer it is in), `place` [M] (its
number in that answer, from 0), `ends` [N] (the last position of each) and `real` [N/2] (1 for pairs, 0 for what fills
up). What fills up M is answer -1's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from ..modeling.head import aligned_log_probs_at, hidden_states_at, log_probs_at
from ..modeling.head import log_probs_with_extra as _log_probs_with_extra
from ..modeling.layer import causal_lm_of
from ..utils.errors import ModelError
from .base import Batch

OWN = frozenset({"at", "ends", "wanted", "answer", "place", "real", "reference", "margin", "label", "right"})
REFERENCE = "reference"  # PEFT's name of a frozen adapter; in a batch: its log-probs [M], fp32


def model_inputs(batch: Batch) -> dict[str, Any]:
    """What of `batch` the model's forward takes."""
    return {key: value for key, value in batch.items() if key not in OWN}


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probabilities fp32 [M] of the trained tokens, differentiable; 0 of what fills up."""
    return log_probs_at(model, model_inputs(batch), batch["at"], batch["wanted"])[0]


def log_probs_beside(model: nn.Module, batch: Batch, beside: Batch) -> tuple[Tensor, Tensor]:
    """The same, and without a gradient those of further answers to its prompts, laid out behind it."""
    asked, theirs = ((each["at"], each["wanted"]) for each in (batch, beside))
    return _log_probs_with_extra(model, model_inputs(batch), asked, model_inputs(beside), theirs)


def reference_log_probs_beside(model: nn.Module, batch: Batch, beside: Batch) -> tuple[Tensor, Tensor]:
    """The same of the reference."""
    if REFERENCE in batch:
        return batch[REFERENCE], beside[REFERENCE]
    with torch.no_grad(), as_reference(model):
        return log_probs_beside(model, batch, beside)


def aligned_log_probs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, and log p − log Σ p² of each, without a gradient."""
    return aligned_log_probs_at(model, model_inputs(batch), batch["at"], batch["wanted"])


def reference_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """The same of the reference: those that the batch brings, else from a forward of their own."""
    if REFERENCE in batch:
        return batch[REFERENCE]
    with torch.no_grad(), as_reference(model):
        return log_probs(model, batch)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Around forwards that the policy is compared with: no dropout and no embedding noise, whatever its mode is."""
    training = [module.__dict__ for module in model.modules() if module.training]
    for own in training:
        own["training"] = False
    try:
        yield
    finally:
        for own in training:
            own["training"] = True


def turn_dropout_off(model: nn.Module) -> None:
    """Set every probability of dropout in a model to 0, in modules and in the attributes that functional dropout reads.

    Methods that compare the model with its reference, or with the model that sampled, would compare noise
    (`disable_dropout` in TRL). Called before an adapter is added, whose `lora_dropout` stays.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0


@contextlib.contextmanager
def without_adapter(model: PeftModel) -> Iterator[None]:
    """Around forwards of the model as it is without its adapter, in eval mode."""
    with model.disable_adapter(), in_eval_mode(model):
        yield


@contextlib.contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Around forwards of the reference, in eval mode: with the adapter of that name if there is one, else without.

    Raises:
        ModelError: `model` has no adapter to take off.
    """
    if not isinstance(model, PeftModel):
        raise ModelError(
            "the reference is the model without its adapter, and this model has none",
            "name a run or an adapter; the evaluations of a run that trains all weights are in its metrics.jsonl",
        )
    with as_adapter(model, REFERENCE) if REFERENCE in model.peft_config else without_adapter(model):
        yield


@contextlib.contextmanager
def as_adapter(model: PeftModel, name: str) -> Iterator[None]:
    """Around forwards with another of the model's adapters than the one that trains, in eval mode."""
    own = model.active_adapter
    model.set_adapter(name)
    try:
        with in_eval_mode(model):
            yield
    finally:
        model.set_adapter(own)


def per_answer(values: Tensor, answer: Tensor, answers: int) -> Tensor:
    """Sums [answers] of `values` [M], which are of `answer` [M]; always added in one order, so with equal bytes."""
    own = answer == torch.arange(answers, device=answer.device).unsqueeze(1)
    return torch.where(own, values, 0).sum(-1)


def shared_lengths(counts: Tensor, answer: Tensor) -> Tensor:
    """[M]: tokens of the shorter answer of the pair that each token is in, from the `counts` [N] of all answers."""
    shorter = counts.view(-1, 2).amin(-1)
    return shorter[answer.clamp(min=0) // 2]


def score(model: nn.Module, batch: Batch, at: str = "ends") -> Tensor:
    """What the head `score` makes of the tokens at the batch's positions `at` (default: each document's last): fp32
    [N, labels of the head], differentiable."""
    hidden = hidden_states_at(model, model_inputs(batch), batch[at])
    head = causal_lm_of(model).score
    with torch.autocast(hidden.device.type, enabled=False):  # the head may be in 16 bits, as adapters are
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
