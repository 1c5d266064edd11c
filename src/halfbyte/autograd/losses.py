"""The losses of a linear head as differentiable operations, opaque to torch.compile.

The forward computes dX [N, H] (`ops.losses`) and saves it, and the gradients of the head and its adapter if these are
trained. Log-probabilities save their inputs instead if the backward must recompute the logits. The logits and copies of
the head are never saved.

The first seven arguments of each op are X, W and the tensors of a `HeadAdapter`. Results list the gradients of the
first six in the same order, which the fields of `Needed` have, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import autocast_dtype, on_compiler
from ..ops import IGNORE_INDEX
from ..ops.cross_entropy import Objective
from ..ops.divergence import linear_divergence
from ..ops.linear_head import NO_ADAPTER, HeadAdapter, HeadGradients, Needed, check_adapter
from ..ops.losses import linear_cross_entropy_forward, linear_log_probs_backward
from ..utils.errors import ModelError

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # of X, W and an adapter; empty if not needed


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """`tensor`, or an empty tensor for None, which a custom op cannot return."""
    return like.new_empty(0) if tensor is None else tensor


def _all_or_empty(grads: HeadGradients, like: Tensor) -> Gradients:
    hidden, weight, inputs, factor, columns, token_rows = (_or_empty(grad, like) for grad in grads)
    return hidden, weight, inputs, factor, columns, token_rows


def _empty_unless(needed: bool, like: Tensor) -> Tensor:
    """Fake result of an op: like `like`, or empty if not needed."""
    return torch.empty_like(like) if needed else like.new_empty(0)


def _fake_gradients(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor]:
    """Fake gradients of the tensors X, W and of an adapter, of which X is not None."""
    hidden: Any = tensors[0]
    pairs = zip(tensors[: len(Needed._fields)], needed, strict=True)
    return [_empty_unless(need and tensor is not None, hidden if tensor is None else tensor) for tensor, need in pairs]


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _needed_gradients(hidden: Tensor, weight: Tensor, adapter: HeadAdapter) -> Needed:
    tensors = (hidden, weight, *adapter[:-1])
    return Needed(*(torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors))


def _save_gradients(ctx, inputs, output) -> None:
    """Save the gradients, the last results of an op whose first is a 0-d loss and the only differentiable one."""
    ctx.save_for_backward(*output[-len(Needed._fields) :])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, grad_loss, *_):
    """Gradients of an op of `_save_gradients`."""
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if grad_loss is not None:
        for i, saved in enumerate(ctx.saved_tensors):
            if ctx.needs_input_grad[i]:
                grads[i] = scaled(saved, grad_loss.reshape([1] * saved.dim()))
    return tuple(grads)


@torch.library.custom_op("halfbyte::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    inputs: Tensor | None,
    factor: Tensor | None,
    columns: Tensor | None,
    token_rows: Tensor | None,
    tokens: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss_sum, gradients)."""
    objective = Objective(scale, softcap, 1.0, label_smoothing, z_loss, ignore_index)
    adapter = HeadAdapter(inputs, factor, columns, token_rows, tokens)
    rows, grads = linear_cross_entropy_forward(hidden, weight, labels, objective, adapter, needed=Needed(*needed))
    return rows.loss.sum(), *_all_or_empty(grads, hidden)


@_linear_cross_entropy.register_fake
def _(hidden, *arguments):
    return hidden.new_empty((), dtype=_accumulation_dtype(hidden)), *_fake_gradients(
        (hidden, *arguments), arguments[-1]
    )


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """`gradient` [N, D] times `factor` [N or 1, 1], in place unless the graph is retained.

    The factor stays fp32 and must not be 0-d, which torch would round to bf16: 1/tokens would be off by up to 0.4%.
    """
    if on_compiler() or type(gradient) is not Tensor:  # traced: the compiler reuses memory by itself
        return (gradient * factor).to(gradient.dtype)
    retained = torch._C._autograd._get_current_graph_task_keep_graph()  # backward(retain_graph=True)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient)) if retained else gradient.mul_(factor)


@torch.library.custom_op("halfbyte::linear_log_probs", mutates_args=())
def _linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    inputs: Tensor | None,
    factor: Tensor | None,
    columns: Tensor | None,
    token_rows: Tensor | None,
    tokens: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    need_entropy: bool,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(log p[label] [N], logsumexp [N], entropy [N], dX and dU of the sum of −log p[label])."""
    objective = Objective(scale, softcap, temperature, ignore_index=ignore_index)
    adapter = HeadAdapter(inputs, factor, columns, token_rows, tokens)
    (loss, logsumexp, entropy), grads = linear_cross_entropy_forward(
        hidden, weight, labels, objective, adapter, need_entropy=need_entropy, needed=Needed(*needed)
    )
    by_rows = _or_empty(grads.hidden, hidden), _or_empty(grads.inputs, hidden)
    return -loss, logsumexp, _or_empty(entropy, loss), *by_rows


@_linear_log_probs.register_fake
def _(hidden, *arguments):
    log_probs = hidden.new_empty(hidden.shape[0], dtype=_accumulation_dtype(hidden))
    need_entropy, needed = arguments[-2:]
    grads = _fake_gradients((hidden, *arguments), needed or [False] * len(Needed._fields))
    return log_probs, torch.empty_like(log_probs), _empty_unless(need_entropy, log_probs), grads[0], grads[2]


@torch.library.custom_op("halfbyte::linear_log_probs_backward", mutates_args=())
def _linear_log_probs_backward(
    hidden: Tensor,
    weight: Tensor,
    inputs: Tensor | None,
    factor: Tensor | None,
    columns: Tensor | None,
    token_rows: Tensor | None,
    tokens: Tensor | None,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients."""
    objective = Objective(scale, softcap, temperature, ignore_index=ignore_index)
    grads = linear_log_probs_backward(
        hidden, weight, labels, logsumexp, None if grad_entropy is None else entropy, grad_log_probs, grad_entropy,
        objective, HeadAdapter(inputs, factor, columns, token_rows, tokens), Needed(*needed),
    )  # fmt: skip
    return _all_or_empty(grads, hidden)


@_linear_log_probs_backward.register_fake
def _(*arguments):
    return tuple(_fake_gradients(arguments, arguments[-1]))


def _setup_log_probs(ctx, inputs, output) -> None:
    *tensors, scale, softcap, temperature, ignore_index, _, needed = inputs
    _, logsumexp, entropy, *by_rows = output
    ctx.options = scale, softcap, temperature, ignore_index
    ctx.scales_rows = any(needed)
    ctx.mark_non_differentiable(logsumexp, *by_rows)
    ctx.set_materialize_grads(False)
    if ctx.scales_rows:
        ctx.save_for_backward(*by_rows)
    else:
        ctx.save_for_backward(*tensors, logsumexp, entropy)


def _backward_of_log_probs(ctx, grad_log_probs, _logsumexp, grad_entropy, *_):
    grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    needs = ctx.needs_input_grad[: len(Needed._fields)]
    if ctx.scales_rows:
        by_rows = zip((0, 2), ctx.saved_tensors, strict=True)
        for i, saved in by_rows if grad_log_probs is not None else ():
            grads[i] = scaled(saved, -grad_log_probs.unsqueeze(1)) if needs[i] else None
    elif grad_log_probs is not None or grad_entropy is not None:
        logsumexp = ctx.saved_tensors[-2]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(logsumexp)
        gradients = _linear_log_probs_backward(*ctx.saved_tensors, grad_log_probs, grad_entropy, *ctx.options, needs)
        grads[: len(needs)] = [grad if need else None for grad, need in zip(gradients, needs, strict=True)]
    return tuple(grads)


_linear_log_probs.register_autograd(_backward_of_log_probs, setup_context=_setup_log_probs)


def flat_rows(hidden: Tensor, dtype: torch.dtype, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [N, H], cast to autocast's dtype or else to `dtype`, the weight's; and labels [N]."""
    if labels.shape != hidden.shape[:-1]:  # flattening would pair rows with wrong labels
        raise ModelError(f"linear_cross_entropy: labels are {list(labels.shape)}, and hidden {list(hidden.shape)}")
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(autocast_dtype(hidden.device.type) or dtype)
    return hidden, labels.reshape(-1).to(hidden.device)


def _flat_adapter(adapter: HeadAdapter, hidden: Tensor, weight: Tensor) -> HeadAdapter:
    """The adapter with its inputs as [N, r] in the dtype of hidden states [N, H]."""
    if adapter.inputs is not None:
        inputs = adapter.inputs.reshape(-1, adapter.inputs.shape[-1]).to(hidden.dtype)
        adapter = adapter._replace(inputs=inputs)
    check_adapter(hidden, weight, adapter)
    return adapter


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    adapter: HeadAdapter = NO_ADAPTER,
    softcap: float | None = None,
    scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shift: bool = True,
    reduction: Literal["sum", "mean"] = "sum",
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Cross-entropy of the logits `scale * hidden @ weight.T`, optionally softcapped, without materializing them.

    Under autocast the GEMM runs in autocast's dtype, like that of an nn.Linear.

    Args:
        hidden: [..., T, H] hidden states, after the final norm.
        weight: [V, H] weight of the head, in 16 or 32 bits; its gradient is computed only if it requires one.
        labels: [..., T] int64; `ignore_index` marks untrained positions.
        adapter: what is added to the logits before the scale, with inputs [..., T, r]; see `ops.linear_head`.
        softcap: logits become softcap · tanh(logits / softcap), as in Gemma 2.
        scale: factor of the logits.
        label_smoothing: share of the target that is spread over the vocabulary, as in torch.
        z_loss: weight of logsumexp² (`ops.cross_entropy`).
        shift: position t predicts label t+1 (Hugging Face's convention); false: label t.
        reduction: sum over trained tokens, or their mean (zero when there are none).

    Returns:
        0-d fp32 loss (fp64 for fp64 input).

    Raises:
        DataError: on a CPU, a label is outside [0, V); on an accelerator the loss is NaN instead.
        ModelError: a softcap that is not above 0, or smoothing outside [0, 1).
    """
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden, labels = flat_rows(hidden, weight.dtype, labels)
    adapter = _flat_adapter(adapter, hidden, weight)
    needed = _needed_gradients(hidden, weight, adapter)
    loss, *_ = _linear_cross_entropy(
        hidden, weight, *adapter, labels, scale, softcap, label_smoothing, z_loss, ignore_index, needed
    )
    if reduction == "mean":
        loss = loss / (labels != ignore_index).sum().clamp(min=1)
    return loss


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    adapter: HeadAdapter = NO_ADAPTER,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `labels` under the logits `scale * hidden @ weight.T`, without materializing these.

    The preference and RL losses are functions of log-probabilities. With a frozen head and adapter, and no gradient of
    the entropy, the forward computes dX and the backward scales its rows, which takes two GEMMs in all instead of
    three. Otherwise the backward recomputes the logits.

    Args:
        hidden, weight, adapter, scale: as in `linear_cross_entropy`.
        labels: [..., T] int64, of the same positions as `hidden` (no shift); the result is 0 for `ignore_index`.
        softcap: logits become softcap · tanh(logits / softcap), before the temperature.
        temperature: divides the logits.
        entropy: also return each position's entropy, in nats.
        entropy_grad: make the entropy differentiable; it is detached otherwise.

    Returns:
        log-probabilities [..., T], fp32 (fp64 for fp64 input); entropy [..., T], or None.

    Raises:
        DataError: on a CPU, a label is outside [0, V); on an accelerator its log-probability is NaN instead.
        ModelError: a softcap or a temperature that is not above 0.
    """
    shape = labels.shape
    hidden, labels = flat_rows(hidden, weight.dtype, labels)
    adapter = _flat_adapter(adapter, hidden, weight)
    entropy = entropy or entropy_grad
    needed = _needed_gradients(hidden, weight, adapter)
    in_forward = Needed() if needed.sums or entropy_grad else needed
    log_probs, _, entropies, *_ = _linear_log_probs(
        hidden, weight, *adapter, labels, scale, softcap, temperature, ignore_index, entropy, in_forward
    )
    if not entropy:
        return log_probs.view(shape), None
    return log_probs.view(shape), (entropies if entropy_grad else entropies.detach()).view(shape)


HeadOptions = Sequence[float]  # scale of the logits[, softcap]


def _objective(options: HeadOptions, temperature: float) -> Objective:
    return Objective(options[0], options[1] if len(options) > 1 else None, temperature)


@torch.library.custom_op("halfbyte::linear_generalized_jsd", mutates_args=())
def _linear_generalized_jsd(
    hidden: Tensor,
    weight: Tensor,
    inputs: Tensor | None,
    factor: Tensor | None,
    columns: Tensor | None,
    token_rows: Tensor | None,
    tokens: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_inputs: Tensor | None,
    teacher_factor: Tensor | None,
    teacher_columns: Tensor | None,
    teacher_token_rows: Tensor | None,
    teacher_tokens: Tensor | None,
    head: Sequence[float],
    teacher_head: Sequence[float],
    temperature: float,
    beta: float,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(sum of divergences, sum of entropies, gradients)."""
    objectives = _objective(head, temperature), _objective(teacher_head, temperature)
    adapter = HeadAdapter(inputs, factor, columns, token_rows, tokens)
    teacher = HeadAdapter(teacher_inputs, teacher_factor, teacher_columns, teacher_token_rows, teacher_tokens)
    divergences = linear_divergence(
        hidden, weight, teacher_hidden, teacher_weight, objectives, beta, Needed(*needed), (adapter, teacher)
    )
    return divergences.divergence.sum(), divergences.entropy.sum(), *_all_or_empty(divergences.grads, hidden)


@_linear_generalized_jsd.register_fake
def _(hidden, *arguments):
    total = hidden.new_empty((), dtype=_accumulation_dtype(hidden))
    return total, torch.empty_like(total), *_fake_gradients((hidden, *arguments), arguments[-1])


_linear_generalized_jsd.register_autograd(_scale_gradients, setup_context=_save_gradients)


def linear_generalized_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    head: HeadOptions = (1.0,),
    teacher_head: HeadOptions = (1.0,),
    adapter: HeadAdapter = NO_ADAPTER,
    teacher_adapter: HeadAdapter = NO_ADAPTER,
) -> tuple[Tensor, Tensor]:
    """The generalized Jensen-Shannon divergence (arXiv:2306.13649, equation 1) of N next-token distributions.

    Both heads compute their logits for a chunk of positions at a time. Under autocast the GEMMs run in autocast's
    dtype, like those of an nn.Linear.

    Args:
        hidden: [N, H] hidden states of the student, after its final norm.
        weight: [V, H] weight of the student's head; its gradient is computed only if it requires one.
        teacher_hidden, teacher_weight: [N, K] and [V, K] of the teacher, without gradients.
        beta: 0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between 0 and 1 as in the paper.
        temperature: divides both models' logits.
        head, teacher_head: scale of the logits and, if any, their softcap; see `modeling.head.Head`.
        adapter, teacher_adapter: of the heads; see `ops.linear_head`.

    Returns:
        0-d sums over positions, fp32 (fp64 for fp64 input): the divergence, which is differentiable, and the student's
        entropy in nats.

    Raises:
        ModelError: the vocabularies or the numbers of positions differ, or an option is out of range.
    """
    autocast = autocast_dtype(hidden.device.type)
    hidden = hidden.to(autocast or weight.dtype)
    teacher_hidden = teacher_hidden.to(autocast or teacher_weight.dtype).detach()
    adapter = _flat_adapter(adapter, hidden, weight)
    teacher_adapter = _flat_adapter(teacher_adapter, teacher_hidden, teacher_weight)
    teacher = [
        None if tensor is None else tensor.detach() for tensor in (teacher_hidden, teacher_weight, *teacher_adapter)
    ]
    needed = _needed_gradients(hidden, weight, adapter)
    loss, entropy, *_ = _linear_generalized_jsd(
        hidden, weight, *adapter, *teacher, list(head), list(teacher_head), temperature, beta, needed
    )
    return loss, entropy
