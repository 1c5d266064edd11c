"""Log-probabilities of the answers in a batch, under the policy and its reference.

A batch of `data.collate_answers` holds the model's inputs and, for the M trained tokens of N answers, computed on the
host: `at`, `wanted` and `answer` [M] (position before the token, token id, index of its answer), `place` [M] (index of
the token in its answer, from 0), `ends` [N] (last position of each answer) and `real` [N/2] (1 for pairs, 0 for
padding). Padding among the M tokens has answer -1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn

from ..batch import REFERENCE, model_inputs
from ..modeling.head import aligned_log_probs_at, hidden_states_at, log_probs_at
from ..modeling.head import log_probs_with_extra as _joint_log_probs
from ..modeling.layer import causal_lm_of
from ..utils.errors import ModelError
from .base import Batch


def log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Return log-probabilities fp32 [M] of the trained tokens, differentiable; 0 for padding."""
    return log_probs_at(model, model_inputs(batch), batch["at"], batch["wanted"])[0]


def joint_log_probs(model: nn.Module, batch: Batch, further: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of a batch and, without a gradient, of further answers to its prompts."""
    tokens = batch["at"], batch["wanted"]
    further_tokens = further["at"], further["wanted"]
    return _joint_log_probs(model, model_inputs(batch), tokens, model_inputs(further), further_tokens)


def joint_reference_log_probs(model: nn.Module, batch: Batch, further: Batch) -> tuple[Tensor, Tensor]:
    """Return `joint_log_probs` of the reference, from the batches if they contain them."""
    if REFERENCE in batch:
        return batch[REFERENCE], further[REFERENCE]
    with torch.no_grad(), as_reference(model):
        return joint_log_probs(model, batch, further)


def aligned_log_probs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [M], and log p − log Σ p² of each without a gradient."""
    return aligned_log_probs_at(model, model_inputs(batch), batch["at"], batch["wanted"])


def reference_log_probs(model: nn.Module, batch: Batch) -> Tensor:
    """Return log-probabilities [M] of the reference, from the batch if it contains them, else from a forward."""
    if REFERENCE in batch:
        return batch[REFERENCE]
    with torch.no_grad(), as_reference(model):
        return log_probs(model, batch)


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and embedding noise inside the context, whatever the model's mode."""
    attributes = [module.__dict__ for module in model.modules() if module.training]
    for of_module in attributes:
        of_module["training"] = False
    try:
        yield
    finally:
        for of_module in attributes:
            of_module["training"] = True


def turn_dropout_off(model: nn.Module) -> None:
    """Set all dropout probabilities of a model to 0, in modules and in the attributes that functional dropout reads.

    Methods that compare the model with its reference, or with the model that sampled, would otherwise compare noise
    (`disable_dropout` in TRL). Called before an adapter is added, so `lora_dropout` is unchanged.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                vars(module)[name] = 0.0


@contextlib.contextmanager
def _frozen_after(model: PeftModel) -> Iterator[None]:
    """Restore `requires_grad` of frozen parameters at the end: PEFT sets it on all weights of an active adapter."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextlib.contextmanager
def without_adapter(model: PeftModel) -> Iterator[None]:
    """Disable the model's adapter inside the context, in eval mode."""
    with _frozen_after(model), model.disable_adapter(), in_eval_mode(model):
        yield


@contextlib.contextmanager
def as_reference(model: nn.Module) -> Iterator[None]:
    """Run the reference inside the context, in eval mode: the adapter named `REFERENCE` if there is one, else the base
    model.

    Raises:
        ModelError: `model` has no adapter to disable.
    """
    if not isinstance(model, PeftModel):
        raise ModelError(
            "the reference is the model without its adapter, and this model has no adapter",
            "give a run or an adapter; the evaluations of a run that trains all weights are in its metrics.jsonl",
        )
    with as_adapter(model, REFERENCE) if REFERENCE in model.peft_config else without_adapter(model):
        yield


@contextlib.contextmanager
def as_adapter(model: PeftModel, name: str) -> Iterator[None]:
    """Activate another of the model's adapters inside the context, in eval mode."""
    active = model.active_adapter
    with _frozen_after(model):
        model.set_adapter(name)
        try:
            with in_eval_mode(model):
                yield
        finally:
            model.set_adapter(active)


def per_answer(values: Tensor, answer: Tensor, answers: int) -> Tensor:
    """Return the sums [answers] of `values` [M] by `answer` [M], in a fixed order, so that results are bit-equal."""
    belongs = answer == torch.arange(answers, device=answer.device).unsqueeze(1)  # [answers, M]
    return torch.where(belongs, values, 0).sum(-1)


def shared_lengths(counts: Tensor, answer: Tensor) -> Tensor:
    """Return [M]: the length of the shorter answer of each token's pair, from the `counts` [N] of all answers."""
    shorter = counts.view(-1, 2).amin(-1)
    return shorter[answer.clamp(min=0) // 2]


def score(model: nn.Module, batch: Batch, at: str = "ends") -> Tensor:
    """Return the outputs of the head `score` at the batch's positions `at` (default: each document's last token).

    The result is fp32 [N, labels of the head], differentiable.
    """
    hidden = hidden_states_at(model, model_inputs(batch), batch[at])
    head = causal_lm_of(model).score
    with torch.autocast(hidden.device.type, enabled=False):  # the head may be in 16 bits, as adapters are
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)


def pooled(model: nn.Module, batch: Batch) -> Tensor:
    """Return the embedding of each text, fp32 [N, H]: the mean of its hidden states at the batch's positions `at`."""
    hidden = hidden_states_at(model, model_inputs(batch), batch["at"]).float()
    texts, answer = len(batch["real"]), batch["answer"]
    if len(answer) == texts:  # one position a text
        return hidden
    with torch.autocast(hidden.device.type, enabled=False):
        belongs = (answer == torch.arange(texts, device=answer.device).unsqueeze(1)).float()  # [N, M]
        return belongs @ hidden / belongs.sum(1, keepdim=True).clamp(min=1)
