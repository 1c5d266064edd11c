"""Cross-entropy of rows of logits, which are replaced in place by their gradient: the specification.

A head's outputs a [V] for one token become logits z, and these a distribution p:

    z = s·a / τ     or, softcapped,     z = c·tanh(s·a / c) / τ          p = softmax(z),  L = logsumexp(z)

With a label y, label smoothing ε (Szegedy et al. 2016, arXiv:1512.00567, section 7) and a z-loss of weight ζ (Chowdhery
et al. 2022, arXiv:2204.02311, section 5) the loss, its gradient, and the entropy H of p with its gradient are

    ℓ = L − (1 − ε)·z_y − ε·mean(z) + ζ·L²          ∂ℓ/∂z = (1 + 2ζL)·p − (1 − ε)·onehot(y) − ε/V
    H = −Σ p·log p                                  ∂H/∂z = −p·(log p + H)

and ∂z/∂a = s/τ, times 1 − tanh² where softcapped. Arithmetic is fp32 (fp64 for fp64 logits) for logits of any dtype. A
gradient is rounded once, when it overwrites its logits. In bf16 this errs by at most 2⁻⁹ of each entry; rounding the
logits after the matmul, by 2⁻⁹ of their size, changes p more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from . import ELSEWHERE, IGNORE_INDEX
from .checks import check_float


class Objective(NamedTuple):
    """How the head's outputs become logits, and logits a loss."""

    scale: float = 1.0  # s
    softcap: float | None = None  # c
    temperature: float = 1.0  # τ
    label_smoothing: float = 0.0  # ε
    z_loss: float = 0.0  # ζ
    ignore_index: int = IGNORE_INDEX

    @property
    def slope(self) -> float:
        """∂z/∂a without the softcap's factor."""
        return self.scale / self.temperature


class RowLosses(NamedTuple):
    """Losses of n rows in fp32 (fp64 for fp64 logits): zero in ignored rows, NaN where a label is outside [0, V)."""

    loss: Tensor  # [n]
    logsumexp: Tensor  # [n]
    entropy: Tensor | None  # [n], in nats


def check_objective(objective: Objective) -> None:
    """Raise a ModelError that names the invalid option."""
    for name in ("softcap", "temperature"):
        value = getattr(objective, name)
        if value is not None and not value > 0:
            raise ModelError(f"cross_entropy: {name} is {value}", "give a number above 0")
    if not 0 <= objective.label_smoothing < 1:
        raise ModelError(f"cross_entropy: label_smoothing is {objective.label_smoothing}", "give a number in [0, 1)")


def check_cross_entropy(logits: Tensor, labels: Tensor, *statistics: Tensor | None) -> None:
    """Raise a ModelError that names the argument that does not fit."""
    check_float("cross_entropy", "logits", logits)
    if logits.dim() != 2 or not logits.shape[1]:
        raise ModelError(f"cross_entropy: logits are {list(logits.shape)}, not [rows, vocabulary]")
    if labels.dtype is not torch.int64 or labels.device != logits.device:
        raise ModelError(f"cross_entropy: labels are {labels.dtype} on {labels.device}",
                         f"pass int64 on {logits.device}")  # fmt: skip
    for name, tensor in (("labels", labels), *(("a row's statistic", statistic) for statistic in statistics)):
        if tensor is not None and tensor.shape != logits.shape[:1]:
            raise ModelError(f"cross_entropy: {name} has shape {list(tensor.shape)}, and logits {list(logits.shape)}")


def logits_of(products: Tensor, objective: Objective) -> tuple[Tensor, Tensor | float]:
    """z and ∂z/∂a; z is `products` itself where the objective changes nothing."""
    if objective.softcap is None:
        return products if objective.slope == 1.0 else products * objective.slope, objective.slope
    tanh = torch.tanh(products * (objective.scale / objective.softcap))
    return tanh * (objective.softcap / objective.temperature), (1.0 - tanh.square()).mul_(objective.slope)


def _outside(labels: Tensor, ignored: Tensor, vocabulary: int) -> Tensor:
    return ~ignored & ((labels < 0) | (labels >= vocabulary))


@op("triton.cross_entropy")
def cross_entropy_(
    logits: Tensor, labels: Tensor, objective: Objective, need_gradient: bool, need_entropy: bool
) -> RowLosses:
    """Losses of rows of logits; the gradient replaces the logits.

    Args:
        logits: [n, V] outputs of the head, any row stride; fp32, fp16 or bf16. With `need_gradient` they become the
            gradient of the sum of the losses with respect to them; otherwise they do not change.
        labels: [n] int64. A row labelled `objective.ignore_index` has no loss and a zero gradient, even if it holds
            NaN; a label outside [0, V) makes its row's loss and gradient NaN.
        need_entropy: also return the entropy of each row.
    """
    check_cross_entropy(logits, labels)
    exact = torch.promote_types(logits.dtype, torch.float32)
    ignored = labels == objective.ignore_index
    outside = _outside(labels, ignored, logits.shape[1])
    targets = labels.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    smoothing = objective.label_smoothing
    z, slope = logits_of(logits.to(exact), objective)
    logsumexp = torch.logsumexp(z, dim=-1).masked_fill(outside, torch.nan)
    loss = logsumexp - (1.0 - smoothing) * z.gather(1, targets).squeeze(1) + objective.z_loss * logsumexp.square()
    if smoothing:
        loss -= smoothing * z.mean(dim=-1)
    entropy = None
    if need_gradient or need_entropy:
        probabilities = (z - logsumexp.unsqueeze(1)).exp_()
        if need_entropy:
            entropy = torch.special.entr(probabilities).sum(-1).masked_fill_(ignored, 0.0)
    if need_gradient:
        gradient = probabilities
        if objective.z_loss:
            gradient.mul_((1.0 + 2.0 * objective.z_loss * logsumexp).unsqueeze(1))
        if smoothing:
            gradient.sub_(smoothing / logits.shape[1])
        gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, smoothing - 1.0))
        logits.copy_(gradient.mul_(slope).masked_fill_(ignored.unsqueeze(1), 0.0))
    return RowLosses(loss.masked_fill_(ignored, 0.0), logsumexp.masked_fill_(ignored, 0.0), entropy)


@op("triton.cross_entropy")
def log_probs_backward_(
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    objective: Objective,
) -> None:
    """Replace recomputed logits by their gradient, given gradients of log p[label] and of the entropy.

    Args:
        logits, labels: as in `cross_entropy_`; smoothing and z-loss are not used. `logits` may be a shard of the
            vocabulary with the logsumexp of the full vocabulary: rows labelled `ELSEWHERE` have their label in another
            shard.
        logsumexp, entropy: [n] as `cross_entropy_` returned them; `entropy` is needed with `grad_entropy` only.
        grad_log_probs: [n] gradient of each row's log-probability, in fp32 (fp64 for fp64 logits).
        grad_entropy: [n] gradient of each row's entropy, or None.
    """
    check_cross_entropy(logits, labels, logsumexp, entropy, grad_log_probs, grad_entropy)
    exact = torch.promote_types(logits.dtype, torch.float32)
    ignored = labels == objective.ignore_index
    elsewhere = labels == ELSEWHERE
    outside = _outside(labels, ignored | elsewhere, logits.shape[1])
    targets = labels.clamp(0, logits.shape[1] - 1).unsqueeze(1)
    z, slope = logits_of(logits.to(exact), objective)
    log_probs = z - logsumexp.unsqueeze(1)
    gradient = log_probs.exp().mul_(-grad_log_probs.unsqueeze(1))
    if grad_entropy is not None and entropy is not None:
        probabilities = log_probs.exp()
        weighted = torch.special.entr(probabilities) - probabilities * entropy.unsqueeze(1)
        gradient.add_(weighted.mul_(grad_entropy.unsqueeze(1)))
    gradient.scatter_add_(1, targets, grad_log_probs.masked_fill(elsewhere, 0.0).unsqueeze(1))
    gradient.mul_(slope).masked_fill_(outside.unsqueeze(1), torch.nan)
    logits.copy_(gradient.masked_fill_(ignored.unsqueeze(1), 0.0))
