"""Losses of a linear head without materialising its logits, which are computed in chunks (`ops.linear_head`).

A loss ends the forward pass, so its gradient is known with the logits: `cross_entropy_` overwrites each chunk of logits
by its gradient, which is then multiplied by W. Forward keeps dX [N, H] instead of logits, and backward only scales it.
The idea is Liger's (arXiv:2410.10989, section 3.2). Rows of dX are independent, so backward may scale each one
differently: gradients of single tokens' log-probabilities, which preference and RL losses need, cost no more than those
of their sum.

Rows of dW, and of the gradients of an adapter's factors, are sums over tokens, and the entropy's gradient is another
function of the logits. For these backward recomputes the logits from X, W and each token's logsumexp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.errors import DataError
from .cross_entropy import Objective, RowLosses, check_objective, cross_entropy_, log_probs_backward_
from .linear_head import NO_ADAPTER, HeadAdapter, HeadGradients, Needed, chunk_rows, products_in_chunks


class LossesAndGrads(NamedTuple):
    rows: RowLosses  # [N] each
    grads: HeadGradients  # of the sum of losses


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
    adapter: HeadAdapter = NO_ADAPTER,
    *,
    need_entropy: bool = False,
    needed: Needed = Needed(hidden=True),  # noqa: B008 (immutable)
    chunk: int | None = None,
) -> LossesAndGrads:
    """Cross-entropy of each row of `hidden @ weight.T` with an adapter, and the gradients of the sum.

    GEMMs run in hidden's dtype; softmax and sums in fp32. Nothing synchronises with an accelerator. A CPU skips the
    GEMMs of rows that are not trained.

    Args:
        hidden: [N, H].
        weight: [V, H].
        labels: [N] int64; rows labelled `objective.ignore_index` have no loss and a zero gradient.
        objective: scale, softcap, temperature, label smoothing, z-loss.
        adapter: of the head.
        need_entropy: also return each row's entropy.
        needed: gradients to compute.
        chunk: rows at a time; default: `chunk_rows`.

    Raises:
        DataError: on a CPU, a label is outside [0, V). On an accelerator, where the check would have to synchronise,
            the row's loss and gradient are NaN instead.
    """
    check_objective(objective)
    chunk = chunk or chunk_rows(weight.shape[0], hidden.device.type, hidden.element_size())
    if not _is_cpu(hidden):
        return cross_entropy_in_chunks(hidden, weight, labels, objective, adapter, need_entropy, needed, chunk)
    trained = (labels != objective.ignore_index).nonzero().squeeze(1)
    targets = labels[trained]
    check_labels(targets, weight.shape[0])
    if len(trained) == len(labels):
        return cross_entropy_in_chunks(hidden, weight, labels, objective, adapter, need_entropy, needed, chunk)
    (loss, logsumexp, entropy), grads = cross_entropy_in_chunks(
        hidden[trained], weight, targets, objective, adapter.at(trained), need_entropy, needed, chunk
    )
    rows = RowLosses(
        _to_rows(loss, trained, labels),
        _to_rows(logsumexp, trained, labels),
        None if entropy is None else _to_rows(entropy, trained, labels),
    )
    return LossesAndGrads(rows, _all_rows(grads, trained, hidden, adapter))


def cross_entropy_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    objective: Objective,
    adapter: HeadAdapter,
    need_entropy: bool,
    needed: Needed,
    chunk: int,
) -> LossesAndGrads:
    """`linear_cross_entropy_forward` of all rows, without its checks."""
    row_losses: list[RowLosses] = []

    def into_gradient(logits: Tensor, rows: slice) -> None:
        row_losses.append(cross_entropy_(logits, labels[rows], objective, any(needed), need_entropy))

    ignored = labels == objective.ignore_index
    grads = products_in_chunks(hidden, weight, ignored, into_gradient, needed, chunk, adapter)
    losses, logsumexps, entropies = zip(*row_losses, strict=True)
    rows = RowLosses(torch.cat(losses), torch.cat(logsumexps), torch.cat(entropies) if need_entropy else None)
    return LossesAndGrads(rows, grads)


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
    adapter: HeadAdapter,
    needed: Needed,
    chunk: int | None = None,
) -> HeadGradients:
    """Gradients of Σ grad_log_probs · log p[label] + Σ grad_entropy · entropy.

    Args:
        logsumexp, entropy: [N] as `linear_cross_entropy_forward` returned them.
        grad_log_probs, grad_entropy: [N] upstream gradients, in fp32 (fp64 for fp64 input).
    """
    chunk = chunk or chunk_rows(weight.shape[0], hidden.device.type, hidden.element_size())
    ignored = labels == objective.ignore_index
    if _is_cpu(hidden) and ignored.any():
        trained = (~ignored).nonzero().squeeze(1)
        grads = linear_log_probs_backward(
            hidden[trained],
            weight,
            labels[trained],
            logsumexp[trained],
            _at(trained, entropy),
            grad_log_probs[trained],
            _at(trained, grad_entropy),
            objective,
            adapter.at(trained),
            needed,
            chunk,
        )
        return _all_rows(grads, trained, hidden, adapter)

    def into_gradient(logits: Tensor, rows: slice) -> None:
        row_values = (labels[rows], logsumexp[rows], _at(rows, entropy), grad_log_probs[rows], _at(rows, grad_entropy))
        log_probs_backward_(logits, *row_values, objective)

    return products_in_chunks(hidden, weight, ignored, into_gradient, needed, chunk, adapter)


def _all_rows(grads: HeadGradients, rows: Tensor, hidden: Tensor, adapter: HeadAdapter) -> HeadGradients:
    """Return gradients that were computed for some rows of X and U, with zeros in the other rows."""
    dx = None if grads.hidden is None else _to_rows(grads.hidden, rows, hidden)
    if grads.inputs is None or adapter.inputs is None:
        return grads._replace(hidden=dx)
    return grads._replace(hidden=dx, inputs=_to_rows(grads.inputs, rows, adapter.inputs))
