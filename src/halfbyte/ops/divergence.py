"""Divergence of a student's distribution over the vocabulary from a teacher's, without materialising their logits.

With p_s and p_t the distributions of student and teacher for a token, and m = (1 − β)·p_s + β·p_t, the generalised
Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649, equation 1) and its gradient for the student's logits
z are

    D = β·KL(p_t ‖ m) + (1 − β)·KL(p_s ‖ m)         ∂D/∂z = (1 − β)·p_s·(log p_s/m − KL(p_s ‖ m))

The ends follow TRL: β = 0 is KL(p_t ‖ p_s), with the gradient p_s − p_t, and β = 1 is KL(p_s ‖ p_t), with the gradient
p_s·(log p_s/p_t − KL(p_s ‖ p_t)). As in `ops.losses`, a chunk of the student's logits is overwritten by its gradient,
which is multiplied by the head's weight; the teacher's chunk is discarded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .checks import check_float
from .cross_entropy import Objective, check_objective, logits_of
from .linear_head import (
    NO_ADAPTER,
    HeadAdapter,
    HeadGradients,
    HeadRows,
    Needed,
    check_adapter,
    chunk_rows,
    products_in_chunks,
)

BUFFERS = 7  # peak fp32 numbers per logit of a chunk, the teacher's logits included


class Divergences(NamedTuple):
    """Divergences of n rows; fp32 (fp64 for fp64 input)."""

    divergence: Tensor  # [n]
    entropy: Tensor  # [n], entropy of the student's distribution in nats
    grads: HeadGradients  # of the sum of divergences


@op("triton.divergence")
def divergence_(
    student: Tensor, teacher: Tensor, objectives: tuple[Objective, Objective], beta: float, need_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Divergence and the student's entropy of each row, from the outputs of two heads.

    Args:
        student: [n, V] in any float dtype; with `need_gradient` it is overwritten by the gradient of the sum.
        teacher: [n, V], of any float dtype; it does not change.
        objectives: the student's and the teacher's scale, softcap and temperature.
        beta: 0 to 1.

    Returns:
        [n] each, in fp32 (fp64 for fp64 input).
    """
    exact = torch.promote_types(student.dtype, torch.float32)
    z, slope = logits_of(student.to(exact), objectives[0])
    student_logs = torch.log_softmax(z, dim=-1)
    teacher_logs = torch.log_softmax(logits_of(teacher.to(exact), objectives[1])[0], dim=-1)
    p = student_logs.exp()
    entropy = -(p * student_logs).sum(-1)
    if beta == 0:
        q = teacher_logs.exp()
        divergence, gradient = (q * (teacher_logs - student_logs)).sum(-1), p.sub_(q)
    else:
        if beta == 1:
            divergence = torch.zeros_like(entropy)
            weight = 1.0
            mixed = teacher_logs
        else:
            near, far = torch.tensor([1 - beta, beta], dtype=torch.float64).log().tolist()
            mixed = torch.logaddexp(student_logs + near, teacher_logs + far)
            divergence, weight = beta * (teacher_logs.exp() * (teacher_logs - mixed)).sum(-1), 1 - beta
        apart = student_logs.sub_(mixed)
        of_student = (p * apart).sum(-1)
        divergence = divergence + weight * of_student
        gradient = p.mul_(apart.sub_(of_student.unsqueeze(1))).mul_(weight)
    if need_gradient:
        student.copy_(gradient.mul_(slope))
    return divergence, entropy


@torch.no_grad()
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    objectives: tuple[Objective, Objective],
    beta: float,
    needed: Needed,
    adapters: tuple[HeadAdapter, HeadAdapter] = (NO_ADAPTER, NO_ADAPTER),
    chunk: int | None = None,
) -> Divergences:
    """Divergence between `hidden @ weight.T` and the teacher's logits in each row, and the gradients of the sum.

    Args:
        hidden, weight: [N, H] and [V, H] of the student, of one dtype.
        teacher_hidden, teacher_weight: [N, K] and [V, K], of one dtype.
        objectives, beta: as in `divergence_`.
        needed: gradients to compute.
        adapters: the student's and the teacher's.
        chunk: rows at a time. Default with a kernel: as for cross-entropy, with twice its logits in memory. Default
            without: the number of rows whose intermediate tensors are as large as cross-entropy's logits.

    Raises:
        ModelError: inconsistent shapes, or a `beta` outside 0 to 1.
    """
    _check(hidden, weight, teacher_hidden, teacher_weight, objectives, beta)
    for inputs, adapter in zip(((hidden, weight), (teacher_hidden, teacher_weight)), adapters, strict=True):
        check_adapter(*inputs, adapter)
    if chunk is None:
        device, size = hidden.device.type, hidden.element_size()
        if divergence_.kernels(device):
            chunk = chunk_rows(len(weight), device, size)
        else:
            rows = chunk_rows(len(weight), device, 4 * BUFFERS + size)
            chunk = max(64, rows // (BUFFERS if device == "cpu" else 1))
    results: list[tuple[Tensor, Tensor]] = []
    teacher = HeadRows(teacher_hidden, teacher_weight, adapters[1], chunk)

    def into_gradient(logits: Tensor, rows: slice) -> None:
        results.append(divergence_(logits, teacher.logits(*teacher.at(rows)), objectives, beta, any(needed)))

    grads = products_in_chunks(hidden, weight, None, into_gradient, needed, chunk, adapters[0])
    divergences, entropies = (torch.cat(column) for column in zip(*results, strict=True))
    return Divergences(divergences, entropies, grads)


def _check(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor,
    objectives: tuple[Objective, Objective], beta: float,
) -> None:  # fmt: skip
    for name, tensor in (("hidden", hidden), ("teacher_hidden", teacher_hidden)):
        check_float("linear_divergence", name, tensor)
    if not 0 <= beta <= 1:
        raise ModelError(f"linear_divergence: beta is {beta}", "give a number from 0 to 1")
    for objective in objectives:
        check_objective(objective)
    shapes = [list(tensor.shape) for tensor in (hidden, weight, teacher_hidden, teacher_weight)]
    (rows, width), (vocabulary, _), (_, teacher_width), _ = shapes
    if shapes != [[rows, width], [vocabulary, width], [rows, teacher_width], [vocabulary, teacher_width]]:
        raise ModelError(
            f"linear_divergence: student {shapes[0]} with head {shapes[1]}, teacher {shapes[2]} with head {shapes[3]}",
            "give both as many rows and one vocabulary",
        )
