"""The losses of a linear head as differentiable operations, opaque to torch.compile.

What is saved for backward is dX [N, H], made in the forward by `ops.losses`, or the inputs where backward must make the
logits again; never the logits, and never a second copy of the head.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import autocast_dtype
from ..ops import IGNORE_INDEX
from ..ops.cross_entropy import Objective
from ..ops.losses import linear_cross_entropy_forward, linear_log_probs_backward
from ..utils.errors import ModelError


def or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns no None: what is not asked for is an empty tensor."""
    return like.new_empty(0) if tensor is None else tensor


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
    return rows.loss.sum(), or_empty(grad_x, hidden), or_empty(grad_w, hidden)


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, scale, softcap, label_smoothing, z_loss, ignore_index, grad_hidden, grad_weight):
    grad_x = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    grad_w = torch.empty_like(weight) if grad_weight else weight.new_empty(0)
    return hidden.new_empty((), dtype=_exact(hidden)), grad_x, grad_w


def _save_gradients(ctx, inputs, output) -> None:
    _, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)


def scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    """`gradient` [N, D] times `factor` [N or 1, 1], over `gradient` itself where nobody will ask for it again.

    The factor keeps its fp32 (so it is not 0-d): 1/tokens rounded to bf16 would be off by up to 0.4%, everywhere.
    """
    if type(gradient) is not Tensor:  # torch.compile traces: what it makes of this reuses memory by itself
        return (gradient * factor).to(gradient.dtype)
    kept = torch._C._autograd._get_current_graph_task_keep_graph()  # backward(retain_graph=True)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient)) if kept else gradient.mul_(factor)


def _scale_gradients(ctx, grad_loss, _grad_hidden, _grad_weight):
    grad_x = grad_w = None
    if grad_loss is not None:
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            grad_x = scaled(grad_hidden, grad_loss.reshape(1, 1))
        if ctx.needs_input_grad[1]:
            grad_w = scaled(grad_weight, grad_loss.reshape(1, 1))
    return grad_x, grad_w, *[None] * 8


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


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
    """(log p[label] [N], logsumexp [N], entropy [N], dX of the negated log-probabilities' sum)."""
    objective = Objective(scale, softcap, temperature, ignore_index=ignore_index)
    (loss, logsumexp, entropy), grad_x, _ = linear_cross_entropy_forward(
        hidden, weight, labels, objective, need_entropy=need_entropy, grad_hidden=grad_hidden
    )
    return -loss, logsumexp, or_empty(entropy, loss), or_empty(grad_x, hidden)


@_linear_log_probs.register_fake
def _(hidden, weight, labels, scale, softcap, temperature, ignore_index, need_entropy, grad_hidden):
    log_probs = hidden.new_empty(hidden.shape[0], dtype=_exact(hidden))
    entropy = torch.empty_like(log_probs) if need_entropy else log_probs.new_empty(0)
    grad_x = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    return log_probs, torch.empty_like(log_probs), entropy, grad_x


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
    grads = linear_log_probs_backward(
        hidden,
        weight,
        labels,
        logsumexp,
        None if grad_entropy is None else entropy,
        grad_log_probs,
        grad_entropy,
        Objective(scale, softcap, temperature, ignore_index=ignore_index),
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )
    return or_empty(grads[0], hidden), or_empty(grads[1], weight)


@_linear_log_probs_backward.register_fake
def _(hidden, weight, *arguments):
    grad_hidden, grad_weight = arguments[-2:]
    grad_x = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    return grad_x, torch.empty_like(weight) if grad_weight else weight.new_empty(0)


def _save_for_log_probs(ctx, inputs, output) -> None:
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
        found = _linear_log_probs_backward(
            *ctx.saved_tensors, grad_log_probs, grad_entropy, *ctx.options, *ctx.needs_input_grad[:2]
        )
        grads = [grad if needed else None for grad, needed in zip(found, ctx.needs_input_grad, strict=False)]
    return *grads, *[None] * 7


_linear_log_probs.register_autograd(_backward_of_log_probs, setup_context=_save_for_log_probs)


def flat_rows(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of hidden states and their labels, in the dtype the product of an nn.Linear would have."""
    dtype = autocast_dtype(hidden.device.type) or weight.dtype
    if labels.shape != hidden.shape[:-1]:  # rows and labels would still be paired, one with another's
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
    """Cross-entropy of the logits `scale * hidden @ weight.T` (softcapped where asked) without holding them.

    Under autocast the product runs in autocast's dtype, as that of an nn.Linear would.

    Args:
        hidden: [..., T, H] hidden states, after the final norm.
        weight: [V, H] weight of the head, in 16 or 32 bits; its gradient is made only if it requires one.
        labels: [..., T] int64, `ignore_index` where nothing is trained.
        softcap: logits become softcap · tanh(logits / softcap), as in Gemma 2.
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
    needed = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden, weight)]
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
    """Log-probabilities of `labels` under the logits `scale * hidden @ weight.T` without holding them.

    The preference and RL losses are functions of these. With a frozen head and no gradient for the entropy, backward
    scales the rows of a dX that forward made: three products in all are two. A trained head, or an entropy to train by,
    makes the logits again in backward.

    Args:
        hidden: [..., T, H] hidden states, after the final norm.
        weight: [V, H] weight of the head, in 16 or 32 bits; its gradient is made only if it requires one.
        labels: [..., T] int64; position t is asked for label t (no shift), and gives 0 where it is `ignore_index`.
        softcap: logits become softcap · tanh(logits / softcap), before the temperature.
        temperature: divides the logits.
        entropy: also return each position's entropy, in nats.
        entropy_grad: the entropy is differentiable (it is detached otherwise).

    Returns:
        log-probabilities [..., T], fp32 (fp64 for fp64 input); entropy [..., T], or None.

    Raises:
        DataError: on a CPU, a label is outside [0, V); on an accelerator its log-probability is NaN instead.
        ModelError: a softcap or a temperature that is not above 0.
    """
    shape = labels.shape
    hidden, weight, labels = flat_rows(hidden, weight, labels)
    grads = torch.is_grad_enabled()
    entropy = entropy or entropy_grad
    unit_gradient = grads and hidden.requires_grad and not weight.requires_grad and not entropy_grad
    log_probs, _, entropies, _ = _linear_log_probs(
        hidden, weight, labels, scale, softcap, temperature, ignore_index, entropy, unit_gradient
    )
    if not entropy:
        return log_probs.view(shape), None
    return log_probs.view(shape), (entropies if entropy_grad else entropies.detach()).view(shape)
