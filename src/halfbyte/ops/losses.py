"""Losses of a linear head without materialising its logits.

For hidden states X [N, H] and a head W [V, H] the logits X Wᵀ of N = 16,384 tokens and V = 128,256 words would take
3.9 GiB in bf16, so they are computed a few hundred tokens at a time. A loss ends the forward pass, so its gradient is
known with the logits: `cross_entropy_` overwrites each chunk of logits by its gradient, which is then multiplied by W.
Forward keeps dX [N, H] instead of logits, and backward only scales it. The idea is Liger's (arXiv:2410.10989, section
3.2). Rows of dX are independent, so backward may scale each one differently: gradients of single tokens'
log-probabilities, which preference and RL losses need, cost no more than those of their sum.

Rows of dW are sums over tokens, and the entropy's gradient is another function of the logits. For these backward
recomputes the logits from X, W and each token's logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.linear import linear_into
from ..utils.errors import DataError
from .cross_entropy import Objective, RowLosses, check_objective, cross_entropy_, log_probs_backward_

LOGITS_CHUNK_BYTES = {"cpu": 32 * 2**20, "accelerator": 128 * 2**20}
WEIGHT_SLICE = 16_384  # rows of dW per partial GEMM, where a GEMM cannot accumulate into fp32


class LossesAndGrads(NamedTuple):
    rows: RowLosses  # [N] each
    grad_hidden: Tensor | None  # [N, H] gradient of the sum of losses, in hidden's dtype
    grad_weight: Tensor | None  # [V, H] gradient of the sum of losses, in weight's dtype


def chunk_rows(vocabulary: int, device_type: str, itemsize: int = 4) -> int:
    """Tokens per chunk, so that its logits fit in `LOGITS_CHUNK_BYTES` of the device type.

    On an accelerator, chunks are multiples of a GEMM's tile of 128 rows and logits have the head's dtype. A CPU
    computes a chunk in fp32.
    """
    if device_type == "cpu":
        return max(LOGITS_CHUNK_BYTES["cpu"] // (4 * vocabulary) // 64 * 64, 64)
    return max(LOGITS_CHUNK_BYTES["accelerator"] // (itemsize * vocabulary) // 128 * 128, 128)


def _is_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def check_labels(targets: Tensor, vocabulary: int) -> None:
    """Raise a DataError that names a label outside [0, vocabulary)."""
    outside = targets[(targets < 0) | (targets >= vocabulary)]
    if len(outside):
        raise DataError(
            f"label {outside[0].item()} is outside the model's vocabulary of {vocabulary}",
            "use the tokenizer that belongs to the model",
        )


def _at(rows: Tensor | slice, values: Tensor | None) -> Tensor | None:
    return None if values is None else values[rows]


def _to_rows(values: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """Scatter `values` to `rows` of a tensor of the shape of `like`, zero elsewhere."""
    return torch.zeros(like.shape, dtype=values.dtype, device=values.device).index_copy_(0, rows, values)


@torch.no_grad()
def linear_cross_entropy_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective = Objective(),  # noqa: B008 (immutable)
    *,
    need_entropy: bool = False,
    grad_hidden: bool = True,
    grad_weight: bool = False,
    chunk: int | None = None,
) -> LossesAndGrads:
    """Cross-entropy of each row of `hidden @ weight.T`, and the gradients of the sum.

    GEMMs run in the weight's dtype; softmax and sums in fp32. Nothing synchronises with an accelerator. A CPU skips the
    GEMMs of rows that are not trained.

    Args:
        hidden: [N, H], of the weight's dtype.
        weight: [V, H].
        labels: [N] int64; rows labelled `objective.ignore_index` have no loss and a zero gradient.
        objective: scale, softcap, temperature, label smoothing, z-loss.
        need_entropy: also return each row's entropy.
        grad_hidden: also return dX.
        grad_weight: also return dW, accumulated in fp32.
        chunk: rows at a time; default: `chunk_rows`.

    Raises:
        DataError: on a CPU, a label is outside [0, V). On an accelerator, where the check would have to synchronise,
            the row's loss and gradient are NaN instead.
    """
    check_objective(objective)
    keys: dict[str, Any] = {"need_entropy": need_entropy, "grad_hidden": grad_hidden, "grad_weight": grad_weight}
    keys["chunk"] = chunk or chunk_rows(weight.shape[0], hidden.device.type, weight.element_size())
    if not _is_cpu(hidden):
        return cross_entropy_in_chunks(hidden, weight, labels, objective, **keys)
    trained = (labels != objective.ignore_index).nonzero().squeeze(1)
    targets = labels[trained]
    check_labels(targets, weight.shape[0])
    if len(trained) == len(labels):
        return cross_entropy_in_chunks(hidden, weight, labels, objective, **keys)
    (loss, logsumexp, entropy), grad_x, grad_w = cross_entropy_in_chunks(
        hidden[trained], weight, targets, objective, **keys
    )
    rows = RowLosses(
        _to_rows(loss, trained, labels),
        _to_rows(logsumexp, trained, labels),
        None if entropy is None else _to_rows(entropy, trained, labels),
    )
    return LossesAndGrads(rows, None if grad_x is None else _to_rows(grad_x, trained, hidden), grad_w)


def cross_entropy_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    *,
    need_entropy: bool,
    grad_hidden: bool,
    grad_weight: bool,
    chunk: int,
) -> LossesAndGrads:
    """`linear_cross_entropy_forward` of all rows, without its checks."""
    row_losses: list[RowLosses] = []

    def into_gradient(logits: Tensor, rows: slice) -> None:
        row_losses.append(cross_entropy_(logits, labels[rows], objective, grad_hidden or grad_weight, need_entropy))

    grads = products_in_chunks(
        hidden, weight, labels == objective.ignore_index, into_gradient, grad_hidden, grad_weight, chunk
    )
    losses, logsumexps, entropies = zip(*row_losses, strict=True)
    rows = RowLosses(torch.cat(losses), torch.cat(logsumexps), torch.cat(entropies) if need_entropy else None)
    return LossesAndGrads(rows, *grads)


@torch.no_grad()
def linear_log_probs_backward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropy: Tensor | None,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    objective: Objective,
    *,
    grad_hidden: bool,
    grad_weight: bool,
    chunk: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients dX [N, H] and dW [V, H] of Σ grad_log_probs · log p[label] + Σ grad_entropy · entropy.

    Args:
        logsumexp, entropy: [N] as `linear_cross_entropy_forward` returned them.
        grad_log_probs, grad_entropy: [N] upstream gradients, in fp32 (fp64 for fp64 input).
    """
    chunk = chunk or chunk_rows(weight.shape[0], hidden.device.type, weight.element_size())
    ignored = labels == objective.ignore_index
    if _is_cpu(hidden) and ignored.any():
        trained = (~ignored).nonzero().squeeze(1)
        grad_x, grad_w = linear_log_probs_backward(
            hidden[trained],
            weight,
            labels[trained],
            logsumexp[trained],
            _at(trained, entropy),
            grad_log_probs[trained],
            _at(trained, grad_entropy),
            objective,
            grad_hidden=grad_hidden,
            grad_weight=grad_weight,
            chunk=chunk,
        )
        return None if grad_x is None else _to_rows(grad_x, trained, hidden), grad_w

    def into_gradient(logits: Tensor, rows: slice) -> None:
        row_values = (labels[rows], logsumexp[rows], _at(rows, entropy), grad_log_probs[rows], _at(rows, grad_entropy))
        log_probs_backward_(logits, *row_values, objective)

    return products_in_chunks(hidden, weight, ignored, into_gradient, grad_hidden, grad_weight, chunk)


def products_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    ignored: Tensor | None,
    into_gradient: Callable[[Tensor, slice], None],
    grad_hidden: bool,
    grad_weight: bool,
    chunk: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute logits of `chunk` rows at a time in one buffer, apply `into_gradient`, and accumulate dX and dW.

    Args:
        ignored: [N] bool; these rows of `hidden` do not enter dW, even if they hold NaN. None: all rows enter.
        into_gradient: overwrites the logits of a slice of rows by the gradient of their loss.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    grad_x = torch.empty_like(hidden) if grad_hidden else None
    grad_w = torch.zeros_like(weight, dtype=exact) if grad_weight else None
    buffer = logits_buffer(hidden, weight, chunk)
    for start in range(0, max(len(hidden), 1), chunk):  # one empty chunk if there are no rows
        rows = slice(start, start + chunk)
        x = hidden[rows]
        logits = linear_into(buffer[: len(x)], x, weight)
        into_gradient(logits, rows)
        if grad_x is not None:
            into = grad_x[rows]
            if (product := linear_into(into, logits, weight.t())) is not into:
                into.copy_(product)
        if grad_w is not None:
            _add_product(grad_w, logits.T, x if ignored is None else x.masked_fill(ignored[rows].unsqueeze(1), 0.0))
        del logits  # free it before the next chunk, where it is not the buffer
    return grad_x, grad_w.to(weight.dtype) if grad_w is not None else None


def logits_buffer(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """Uninitialized logits [min(chunk, N), V] with a row stride of a multiple of 16, for vector loads and GEMMs."""
    vocabulary = len(weight)
    return hidden.new_empty(min(chunk, len(hidden)), -(-vocabulary // 16) * 16)[:, :vocabulary]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` += a @ b, where `total` may be fp32 and the factors 16-bit."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # the product is rounded to 16 bits; slices, because a full one would be as large as the weight
        for start in range(0, len(total), WEIGHT_SLICE):
            rows = slice(start, start + WEIGHT_SLICE)
            total[rows] += a[rows] @ b
