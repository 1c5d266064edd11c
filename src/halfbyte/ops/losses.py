"""Losses of a linear head without its logits.

For hidden states X [N, H] and a head W [V, H] the products X Wᵀ of N = 16,384 tokens and V = 128,256 words would take
3.9 GiB in bf16. So they are made a few hundred tokens at a time. A loss is the last thing of a forward pass and its
gradient is known as soon as the logits are: each chunk turns its logits into their gradient, in place, by
`cross_entropy_`, and multiplies it back onto W. Forward then holds dX [N, H] in the logits' place, and backward only
scales it. The idea is Liger's (arXiv:2410.10989, section 3.2). Rows do not mix in dX, so backward may scale each by a
number of its own: the gradients of single tokens' log-probabilities, which preference and RL losses need, cost no more
than those of their sum.

They do mix in dW, and the entropy's gradient is another function of the logits: for those backward makes the logits
again, from X, W and the logsumexp of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.errors import DataError
from .cross_entropy import Objective, RowLosses, check_objective, cross_entropy_, log_probs_backward_
from .rows import linear_into

LOGITS_CHUNK_BYTES = {"cpu": 32 * 2**20, "accelerator": 128 * 2**20}
WEIGHT_SLICE = 16_384  # rows of dW that a chunk adds to at a time, where a product cannot add to fp32


class LossesAndGrads(NamedTuple):
    rows: RowLosses  # [N] each
    grad_hidden: Tensor | None  # [N, H] of the losses' sum, hidden's dtype
    grad_weight: Tensor | None  # [V, H] of the losses' sum, weight's dtype


def chunk_rows(vocabulary: int, device_type: str, itemsize: int = 4) -> int:
    """Tokens per chunk, so that its logits stay within `LOGITS_CHUNK_BYTES` of its kind of device.

    On an accelerator they are whole tiles of a matrix product, of 128 rows, and logits have the head's dtype. A CPU
    computes with a chunk in fp32.
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
    """`values` at `rows` of a tensor of the shape of `like`, zero elsewhere."""
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
    """Cross-entropy of each row of `hidden @ weight.T`, and the gradients of their sum.

    Products run in the weight's dtype; softmax and sums in fp32. Nothing waits for an accelerator. On a CPU, where
    counting is free, rows that are not trained cost no product.

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
        DataError: on a CPU, a label is outside [0, V). On an accelerator, where raising would have to wait for it, the
            row's loss and gradient are NaN instead.
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
    """`linear_cross_entropy_forward` without its checks, all rows alike."""
    found: list[RowLosses] = []

    def into_gradient(logits: Tensor, rows: slice) -> None:
        found.append(cross_entropy_(logits, labels[rows], objective, grad_hidden or grad_weight, need_entropy))

    grads = products_in_chunks(
        hidden, weight, labels == objective.ignore_index, into_gradient, grad_hidden, grad_weight, chunk
    )
    losses, logsumexps, entropies = zip(*found, strict=True)
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
    """dX [N, H] and dW [V, H] of Σ grad_log_probs · log p[label] + Σ grad_entropy · entropy, from logits made again.

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
        parts = (labels[rows], logsumexp[rows], _at(rows, entropy), grad_log_probs[rows], _at(rows, grad_entropy))
        log_probs_backward_(logits, *parts, objective)

    return products_in_chunks(hidden, weight, ignored, into_gradient, grad_hidden, grad_weight, chunk)


def products_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    ignored: Tensor,
    into_gradient: Callable[[Tensor, slice], None],
    grad_hidden: bool,
    grad_weight: bool,
    chunk: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Logits of `chunk` rows at a time in one buffer, `into_gradient` over them, and the products back: dX and dW.

    Args:
        ignored: [N] bool; what such rows of `hidden` hold, NaN even, stays out of dW.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    grad_x = torch.empty_like(hidden) if grad_hidden else None
    grad_w = torch.zeros_like(weight, dtype=exact) if grad_weight else None
    buffer = room_for_logits(hidden, weight, chunk)
    for start in range(0, max(len(hidden), 1), chunk):  # of no rows, one empty chunk
        rows = slice(start, start + chunk)
        x = hidden[rows]
        logits = linear_into(buffer[: len(x)], x, weight)
        into_gradient(logits, rows)
        if grad_x is not None:
            into = grad_x[rows]
            if (product := linear_into(into, logits, weight.t())) is not into:
                into.copy_(product)
        if grad_w is not None:
            _add_product(grad_w, logits.T, x.masked_fill(ignored[rows].unsqueeze(1), 0.0))
        del logits  # the next may be a tensor beside them
    return grad_x, grad_w.to(weight.dtype) if grad_w is not None else None


def room_for_logits(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """[chunk or fewer, V], uninitialized: rows begin at multiples of 16 logits, what vector loads and matrix products
    want."""
    vocabulary = len(weight)
    return hidden.new_empty(min(chunk, len(hidden)), -(-vocabulary // 16) * 16)[:, :vocabulary]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total` += a @ b, for a `total` in fp32 and 16-bit factors too."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda" and torch.version.hip is None:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # a product rounded to 16 bits first, a slice at a time: whole it would be as large as the weight
        for start in range(0, len(total), WEIGHT_SLICE):
            rows = slice(start, start + WEIGHT_SLICE)
            total[rows] += a[rows] @ b
