"""The divergence of a linear head from a teacher's as a differentiable operation, opaque to torch.compile.

What is saved for backward is dX [N, H], made in the forward by `ops.divergence`, and where the head is trained dW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import autocast_dtype
from ..ops.cross_entropy import Objective
from ..ops.divergence import linear_divergence
from .losses import or_empty, scaled

Numbers = Sequence[float]


def _objective(numbers: Numbers, temperature: float) -> Objective:
    """From a scale and, where there is one, a softcap."""
    return Objective(numbers[0], numbers[1] if len(numbers) > 1 else None, temperature)


@torch.library.custom_op("halfbyte::linear_generalized_jsd", mutates_args=())
def _linear_generalized_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    head: Numbers,
    teacher_head: Numbers,
    temperature: float,
    beta: float,
    grad_hidden: bool,
    grad_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sum of divergences, sum of entropies, dX, dW)."""
    objectives = _objective(head, temperature), _objective(teacher_head, temperature)
    found = linear_divergence(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        objectives,
        beta,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
    )
    grad_x, grad_w = or_empty(found.grad_hidden, hidden), or_empty(found.grad_weight, hidden)
    return found.divergence.sum(), found.entropy.sum(), grad_x, grad_w


@_linear_generalized_jsd.register_fake
def _(hidden, weight, teacher_hidden, teacher_weight, head, teacher_head, temperature, beta, grad_hidden, grad_weight):
    total = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    grad_x = torch.empty_like(hidden) if grad_hidden else hidden.new_empty(0)
    grad_w = torch.empty_like(weight) if grad_weight else weight.new_empty(0)
    return total, torch.empty_like(total), grad_x, grad_w


def _save_gradients(ctx, inputs, output) -> None:
    _, entropy, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(entropy, grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, grad_loss, *_):
    grads: list[Tensor | None] = [None, None]
    if grad_loss is not None:
        for i, saved in enumerate(ctx.saved_tensors):
            grads[i] = scaled(saved, grad_loss.reshape(1, 1)) if ctx.needs_input_grad[i] else None
    return *grads, *[None] * 8


_linear_generalized_jsd.register_autograd(_scale_gradients, setup_context=_save_gradients)


def linear_generalized_jsd(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    head: Numbers = (1.0,),
    teacher_head: Numbers = (1.0,),
) -> tuple[Tensor, Tensor]:
    """The generalised Jensen-Shannon divergence (arXiv:2306.13649, equation 1) of the distributions of N positions.

    Neither model's logits are held: both heads compute a chunk of positions at a time. Under autocast the products run
    in autocast's dtype, as those of nn.Linears would.

    Args:
        hidden: [N, H] hidden states of the student, after its final norm.
        weight: [V, H] weight of its head; its gradient is made only if it requires one.
        teacher_hidden, teacher_weight: [N, K] and [V, K] of the teacher, who gets no gradient.
        beta: 0: KL(teacher ‖ student); 1: KL(student ‖ teacher); between them as in the paper.
        temperature: divides both models' logits.
        head, teacher_head: scale of the products, and where there is one, softcap; see `modeling.head.Head`.

    Returns:
        0-d sums over positions, fp32 (fp64 for fp64 input): of the divergence, differentiable, and of the student's
        entropy in nats.

    Raises:
        ModelError: the vocabularies or the numbers of positions differ; numbers that nothing can be made of.
    """
    given = (hidden, weight, teacher_hidden, teacher_weight)
    autocast, dtypes = autocast_dtype(hidden.device.type), [weight.dtype] * 2 + [teacher_weight.dtype] * 2
    student, own, teacher, its = (tensor.to(autocast or dtype) for tensor, dtype in zip(given, dtypes, strict=True))
    needed = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (student, own)]
    teacher, its = teacher.detach(), its.detach()
    loss, entropy, _, _ = _linear_generalized_jsd(
        student, own, teacher, its, list(head), list(teacher_head), temperature, beta, *needed
    )
    return loss, entropy
