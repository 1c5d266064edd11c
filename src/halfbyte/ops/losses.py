"""Cross-entropy of a linear head without its logits: the torch reference, which is also the product on a CPU.

For hidden states X [N, H] and a head W [V, H], the logits are z = s · X Wᵀ (softcapped to c · tanh(z / c) where asked),
and the loss of a trained token is logsumexp(z) − z[label]. At N = 16,384 and V = 128,256 the fp32 logits alone would
take 7.8 GiB, so they are made a few hundred tokens at a time. The loss is the last thing of a forward pass and its
gradient is softmax(z) − onehot(label), known as soon as z is: so each chunk also turns its logits into their gradient,
in place, and multiplies it back onto W. Forward then holds dX [N, H] in the logits' place, and backward only scales
it. The idea is Liger's (arXiv 2410.10989, section 3.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError

LOGITS_CHUNK_BYTES = {"cpu": 32 * 2**20, "accelerator": 256 * 2**20}


class LossAndGrads(NamedTuple):
    loss_sum: Tensor  # 0-d, fp32 (fp64 for fp64 input)
    grad_hidden: Tensor | None  # [N, H], hidden's dtype
    grad_weight: Tensor | None  # [V, H], weight's dtype


def chunk_rows(vocabulary: int, device_type: str) -> int:
    """Tokens per chunk, so that one fp32 chunk of logits stays within `LOGITS_CHUNK_BYTES` of its kind of device."""
    budget = LOGITS_CHUNK_BYTES["cpu" if device_type == "cpu" else "accelerator"]
    rows = budget // (4 * vocabulary)
    return max(rows // 64 * 64, 64)


def _is_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@torch.no_grad()
def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
    grad_hidden: bool = True,
    grad_weight: bool = False,
    chunk: int | None = None,
) -> LossAndGrads:
    """Summed cross-entropy of `scale * hidden @ weight.T`, and the gradients of that sum.

    Products run in the weight's dtype; softmax and sums in fp32. Nothing waits for an accelerator.

    Args:
        hidden: [N, H], of the weight's dtype.
        weight: [V, H].
        labels: [N] int64; rows labelled `ignore_index` give no loss and a zero gradient.
        softcap: logits become softcap · tanh(logits / softcap), as in Gemma 2.
        scale: factor on the logits, before the softcap.
        grad_hidden: also return dX.
        grad_weight: also return dW, accumulated in fp32.
        chunk: rows at a time; default: `chunk_rows`.

    Raises:
        DataError: on a CPU, a label is outside [0, V). On an accelerator, where raising would have to wait for it, the
            loss and the row's gradient are NaN instead.
    """
    options: dict[str, Any] = {
        "softcap": softcap,
        "scale": scale,
        "grad_hidden": grad_hidden,
        "grad_weight": grad_weight,
    }
    options["chunk"] = chunk or chunk_rows(weight.shape[0], hidden.device.type)
    if _is_cpu(hidden):
        return _trained_rows_only(hidden, weight, labels, ignore_index, options)
    ignored = labels == ignore_index
    outside = ~ignored & ((labels < 0) | (labels >= weight.shape[0]))
    targets = labels.clamp(0, weight.shape[0] - 1)
    result = cross_entropy_in_chunks(hidden, weight, targets, ignored, **options)
    loss_sum = torch.where(outside.any(), torch.nan, result.loss_sum)
    if result.grad_hidden is not None:
        result.grad_hidden.masked_fill_(outside.unsqueeze(1), torch.nan)
    return result._replace(loss_sum=loss_sum)


def _trained_rows_only(
    hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, options: dict[str, Any]
) -> LossAndGrads:
    """On a CPU, counting is free: check the labels, and spend no product on rows that are not trained."""
    trained = (labels != ignore_index).nonzero().squeeze(1)
    targets = labels[trained]
    outside = targets[(targets < 0) | (targets >= weight.shape[0])]
    if len(outside):
        raise DataError(
            f"label {outside[0].item()} is outside the model's vocabulary of {weight.shape[0]}",
            "use the tokenizer that belongs to the model",
        )
    all_trained = len(trained) == len(labels)
    result = cross_entropy_in_chunks(hidden if all_trained else hidden[trained], weight, targets, None, **options)
    if all_trained or result.grad_hidden is None:
        return result
    return result._replace(grad_hidden=torch.zeros_like(hidden).index_copy_(0, trained, result.grad_hidden))


def cross_entropy_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: Tensor | None,
    *,
    softcap: float | None,
    scale: float,
    grad_hidden: bool,
    grad_weight: bool,
    chunk: int,
) -> LossAndGrads:
    """The loop over chunks of rows: `targets` [N] within [0, V), `ignored` [N] bool, or None where all are trained."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    loss_sum = torch.zeros((), dtype=exact, device=hidden.device)
    grad_x = torch.empty_like(hidden) if grad_hidden else None
    grad_w = torch.zeros_like(weight, dtype=exact) if grad_weight else None
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        skip = ignored[rows] if ignored is not None else None
        losses, grad_logits = _token_losses(hidden[rows], weight, targets[rows], skip, softcap, scale)
        loss_sum += losses.sum()
        if grad_hidden or grad_weight:
            grad_logits = grad_logits.to(weight.dtype)
        if grad_x is not None:
            torch.mm(grad_logits, weight, out=grad_x[rows])
        if grad_w is not None:
            grad_w += grad_logits.T @ hidden[rows]
    return LossAndGrads(loss_sum, grad_x, grad_w.to(weight.dtype) if grad_w is not None else None)


def _token_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: Tensor | None, softcap: float | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Losses [n] of one chunk, and the gradient [n, V] of their sum with respect to hidden @ weight.T; both fp32."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden @ weight.T
    if scale != 1.0 or softcap is not None:
        logits = logits.to(exact).mul_(scale if softcap is None else scale / softcap)
    if softcap is not None:
        logits = logits.tanh_()
    log_probs = torch.log_softmax(logits if softcap is None else logits * softcap, dim=-1, dtype=exact)
    losses = -log_probs.gather(1, targets.unsqueeze(1)).squeeze(1)
    gradient = log_probs.exp_()
    gradient.scatter_add_(1, targets.unsqueeze(1), gradient.new_full((len(targets), 1), -1.0))
    if softcap is not None:  # the derivative of c · tanh(z / c) is 1 − tanh²
        gradient.mul_(logits.square_().neg_().add_(1.0))
    if scale != 1.0:
        gradient.mul_(scale)
    if ignored is not None:
        losses = losses.masked_fill(ignored, 0.0)
        gradient.masked_fill_(ignored.unsqueeze(1), 0.0)
    return losses, gradient
