"""The loss of a linear head as one differentiable operation, opaque to torch.compile.

What is saved for backward is dX [N, H] (and dW where the head is trained), made in the forward by
`ops.losses.linear_cross_entropy_forward`; never the logits, and never a second copy of the head.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.losses import linear_cross_entropy_forward


@torch.library.custom_op("halfbyte::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    softcap: float | None,
    scale: float,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, dX, dW); a gradient that is not asked for is an empty tensor, since an operator returns no None."""
    result = linear_cross_entropy_forward(
        hidden,
        weight,
        labels,
        softcap=softcap,
        scale=scale,
        ignore_index=ignore_index,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )
    grads = [hidden.new_empty(0) if grad is None else grad for grad in result[1:]]
    return result.loss_sum, grads[0], grads[1]


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, softcap, scale, ignore_index, grad_hidden, grad_weight):
    loss_sum = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    grad_x = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    return loss_sum, grad_x, torch.empty_like(weight) if grad_weight else weight.new_empty(0)


def _save_gradients(ctx, inputs, output) -> None:
    _, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    # A 0-d factor such as 1/tokens would be rounded to bf16 first: an error of up to 0.4% on the whole gradient.
    return torch.mul(gradient, factor.reshape(1, 1)).to(gradient.dtype)


def _scale_gradients(ctx, grad_loss, _grad_hidden, _grad_weight):
    grad_x = grad_w = None
    if grad_loss is not None:
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            grad_x = _scaled(grad_hidden, grad_loss)
        if ctx.needs_input_grad[1]:
            grad_w = _scaled(grad_weight, grad_loss)
    return grad_x, grad_w, None, None, None, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    shift: bool = True,
    reduction: Literal["sum", "mean"] = "sum",
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of the logits `scale * hidden @ weight.T` (softcapped where asked) without holding them.

    Under autocast the product runs in autocast's dtype, as that of an nn.Linear would.

    Args:
        hidden: [..., T, H] hidden states, after the final norm.
        weight: [V, H] weight of the head, in 16 or 32 bits; its gradient is made only if it requires one.
        labels: [..., T] int64, `ignore_index` where nothing is trained.
        shift: position t predicts label t+1 (Hugging Face's convention); false: label t.
        reduction: sum over trained tokens, or their mean (zero when there are none).

    Returns:
        0-d fp32 loss (fp64 for fp64 input).

    Raises:
        DataError: on a CPU, a label is outside [0, V); on an accelerator the loss is NaN instead.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        compute_dtype = torch.get_autocast_dtype(hidden.device.type)
    else:
        compute_dtype = weight.dtype
    if shift:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    hidden = hidden.reshape(-1, hidden.shape[-1]).to(compute_dtype)
    weight, labels = weight.to(compute_dtype), labels.reshape(-1).to(hidden.device)
    grads = torch.is_grad_enabled()
    loss, _, _ = _linear_cross_entropy(
        hidden,
        weight,
        labels,
        softcap,
        scale,
        ignore_index,
        grads and hidden.requires_grad,
        grads and weight.requires_grad,
    )
    if reduction == "mean":
        loss = loss / (labels != ignore_index).sum().clamp(min=1)
    return loss
