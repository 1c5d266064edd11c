"""The losses of a linear head as differentiable operations, opaque to torch.compile.

The forward computes dX [N, H] (`ops.losses`) and saves it, and dW if the head is trained. Log-probabilities save their
inputs instead if the backward must recompute the logits. The logits and copies of the head are never saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import autocast_dtype, on_compiler
from ..ops import IGNORE_INDEX
from ..ops.cross_entropy import Objective
from ..ops.divergence import linear_divergence
from ..ops.losses import linear_cross_entropy_forward, linear_log_probs_backward
from ..utils.errors import ModelError


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """`tensor`, or an empty tensor for None, which a custom op cannot return."""
    return like.new_empty(0) if tensor is None else tensor


def _empty_unless(needed: bool, like: Tensor) -> Tensor:
    """Fake result of an op: like `like`, or empty if not needed."""
    return torch.empty_like(like) if needed else like.new_empty(0)


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _needed_gradients(*tensors: Tensor) -> list[bool]:
    return [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]


def _save_gradients(ctx, inputs, output) -> None:
    """Save dX and dW, the last results of an op whose first is a 0-d loss and the only differentiable one."""
    ctx.save_for_backward(*output[-2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, grad_loss, *_):
    """Gradients of an op of `_save_gradients`, which has ten arguments."""
    grads: list[Tensor | None] = [None] * 10
    if grad_loss is not None:
        for i, saved in enumerate(ctx.saved_tensors):
            grads[i] = scaled(saved, grad_loss.reshape(1, 1)) if ctx.needs_input_grad[i] else None
    return tuple(grads)


@torch.library.custom_op("halfbyte::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float,
    softcap: float | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, dX, dW)."""
    objective = Objective(scale, softcap, 1.0, label_smoothing, z_loss, ignore_index)
    rows, grad_x, grad_w = linear_cross_entropy_forward(
        hidden, weight, labels, objective, grad_hidden=grad_hidden, grad_weight=grad_weight
    )
    return rows.loss.sum(), _or_empty(grad_x, hidden), _or_empty(grad_w, hidden)


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, scale, softcap, label_smoothing, z_loss, ignore_index, grad_hidden, grad_weight):
    loss = hidden.new_empty((), dtype=_accumulation_dtype(hidden))
    return loss, _empty_unless(grad_hidden, hidden), _empty_unless(grad_weight, weight)


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
    labels: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    need_entropy: bool,
    grad_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log p[label] [N], logsumexp [N], entropy [N], dX of the sum of −log p[label])."""
    objective = Objective(scale, softcap, temperature, ignore_index=ignore_index)
    (loss, logsumexp, entropy), grad_x, _ = linear_cross_entropy_forward(
        hidden, weight, labels, objective, need_entropy=need_entropy, grad_hidden=grad_hidden
    )
    return -loss, logsumexp, _or_empty(entropy, loss), _or_empty(grad_x, hidden)


@_linear_log_probs.register_fake
def _(hidden, weight, labels, scale, softcap, temperature, ignore_index, need_entropy, grad_hidden):
    log_probs = hidden.new_empty(hidden.shape[0], dtype=_accumulation_dtype(hidden))
    entropy = _empty_unless(need_entropy, log_probs)
    return log_probs, torch.empty_like(log_probs), entropy, _empty_unless(grad_hidden, hidden)


@torch.library.custom_op("halfbyte::linear_log_probs_backward", mutates_args=())
def _linear_log_probs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    scale: float,
    softcap: float | None,
    temperature: float,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    """(dX, dW)."""
    objective = Objective(scale, softcap, temperature, ignore_index=ignore_index)
    grads = linear_log_probs_backward(
        hidden, weight, labels, logsumexp, None if grad_entropy is None else entropy, grad_log_probs, grad_entropy,
        objective, grad_hidden=grad_hidden, grad_weight=grad_weight,
    )  # fmt: skip
    return _or_empty(grads[0], hidden), _or_empty(grads[1], weight)


@_linear_log_probs_backward.register_fake
def _(hidden, weight, *arguments):
    grad_hidden, grad_weight = arguments[-2:]
    return _empty_unless(grad_hidden, hidden), _empty_unless(grad_weight, weight)


def _setup_log_probs(ctx, inputs, output) -> None:
    hidden, weight, labels, *ctx.options, _, ctx.scales_rows = inputs
    _, logsumexp, entropy, grad_hidden = output
    ctx.mark_non_differentiable(logsumexp, grad_hidden)
    ctx.set_materialize_grads(False)
    if ctx.scales_rows:
        ctx.save_for_backward(grad_hidden)
    else:
        ctx.save_for_backward(hidden, weight, labels, logsumexp, entropy)


def _backward_of_log_probs(ctx, grad_log_probs, _logsumexp, grad_entropy, _grad_hidden):
    grads: list[Tensor | None] = [None, None]
    if ctx.scales_rows:
        if grad_log_probs is not None:
            grads[0] = scaled(ctx.saved_tensors[0], -grad_log_probs.unsqueeze(1))
    elif grad_log_probs is not None or grad_entropy is not None:
        logsumexp = ctx.saved_tensors[3]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(logsumexp)
        gradients = _linear_log_probs_backward(
            *ctx.saved_tensors, grad_log_probs, grad_entropy, *ctx.options, *ctx.needs_input_grad[:2]
        )
        grads = [grad if needed else None for grad, needed in zip(gradients, ctx.needs_input_grad, strict=False)]
    return *grads, *[None] * 7


_linear_log_probs.register_autograd(_backward_of_log_probs, setup_context=_setup_log_probs)


def flat_rows(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [N, H], weight and labels [N], cast to autocast's dtype or else the weight's."""
    dtype = autocast_dtype(hidden.device.type) or weight.dtype
    if labels.shape != hidden.shape[:-1]:  # flattening would pair rows with wrong labels
        raise ModelError(f"linear_cross_entropy: labels are {list(labels.shape)}, and hidden {list(hidden.shape)}")
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
    return hidden, weight.to(dtype), labels.reshape(-1).to(hidden.device)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
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
    hidden, weight, labels = flat_rows(hidden, weight, labels)
    needed = _needed_gradients(hidden, weight)
    loss, _, _ = _linear_cross_entropy(
        hidden, weight, labels, scale, softcap, label_smoothing, z_loss, ignore_index, *needed
    )
    if reduction == "mean":
        loss = loss / (labels != ignore_index).sum().clamp(min=1)
    return loss


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_grad: bool = False,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `labels` under the logits `scale * hidden @ weight.T`, without materializing these.

    The preference and RL losses are functions of log-probabilities. With a frozen head and no gradient of the entropy,
    the forward computes dX and the backward scales its rows, which takes two GEMMs in all instead of three. Otherwise
    the backward recomputes the logits.

    Args:
        hidden, weight, scale: as in `linear_cross_entropy`.
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
    hidden, weight, labels = flat_rows(hidden, weight, labels)
    entropy = entropy or entropy_grad
    needs_hidden, needs_weight = _needed_gradients(hidden, weight)
    grad_in_forward = needs_hidden and not needs_weight and not entropy_grad
    log_probs, _, entropies, _ = _linear_log_probs(
        hidden, weight, labels, scale, softcap, temperature, ignore_index, entropy, grad_in_forward
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
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    head: Sequence[float],
    teacher_head: Sequence[float],
    temperature: float,
    beta: float,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of divergences, sum of entropies, dX, dW)."""
    objectives = _objective(head, temperature), _objective(teacher_head, temperature)
    divergences = linear_divergence(
        hidden, weight, teacher_hidden, teacher_weight, objectives, beta, grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )  # fmt: skip
    grad_x, grad_w = _or_empty(divergences.grad_hidden, hidden), _or_empty(divergences.grad_weight, hidden)
    return divergences.divergence.sum(), divergences.entropy.sum(), grad_x, grad_w


@_linear_generalized_jsd.register_fake
def _(hidden, weight, teacher_hidden, teacher_weight, head, teacher_head, temperature, beta, grad_hidden, grad_weight):
    total = hidden.new_empty((), dtype=_accumulation_dtype(hidden))
    grads = _empty_unless(grad_hidden, hidden), _empty_unless(grad_weight, weight)
    return total, torch.empty_like(total), *grads


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

    Returns:
        0-d sums over positions, fp32 (fp64 for fp64 input): the divergence, which is differentiable, and the student's
        entropy in nats.

    Raises:
        ModelError: the vocabularies or the numbers of positions differ, or an option is out of range.
    """
    autocast = autocast_dtype(hidden.device.type)
    hidden, weight = (tensor.to(autocast or weight.dtype) for tensor in (hidden, weight))
    teacher = [tensor.to(autocast or teacher_weight.dtype).detach() for tensor in (teacher_hidden, teacher_weight)]
    needed = _needed_gradients(hidden, weight)
    loss, entropy, _, _ = _linear_generalized_jsd(
        hidden, weight, *teacher, list(head), list(teacher_head), temperature, beta, *needed
    )
    return loss, entropy
