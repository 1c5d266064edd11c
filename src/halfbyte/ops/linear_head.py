"""Logits of a linear head and their gradients, for a chunk of rows at a time, with an adapter on the head.

For hidden states X [N, H] and a head W [V, H] the logits X Wᵀ of N = 16,384 tokens and V = 128,256 words would take
3.9 GiB in bf16, so they are computed a few hundred rows at a time, in one buffer. A loss overwrites each chunk by its
gradient G, which is multiplied at once: dX = G W, dW += Gᵀ X.

An adapter changes the logits, in this order:

    Z = c ∘ (X Wᵀ + U Bᵀ), and Z[:, t] = X Rᵀ for its tokens t

U [N, r] B [V, r] is LoRA's term, with U = dropout(X) Aᵀ from the caller, whose gradient then reaches A and X by
autograd; s is a factor of B. A bias is a term with a column of ones in U. c [V] are DoRA's factors. R [T, H] are rows
of single tokens that are trained instead of W's. Neither W + B·A nor a copy of W with the rows R is formed. With G and
Z before the factors, which is copied only where c is trained:

    R: dR += G[:, t]ᵀ X, dX += G[:, t] R, then G[:, t] = 0
    c: dc += Σ G ∘ Z over rows, then G = c ∘ G
    U, B: dU = G B, dB += Gᵀ U

Sources: the chunks, Liger (arXiv:2410.10989, section 3.2); LoRA (arXiv:2106.09685, section 4.1); DoRA
(arXiv:2402.09353, section 4.3); the rows, PEFT's trainable tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.linear import linear_into
from ..utils.errors import ModelError
from .dora import column_dots

LOGITS_CHUNK_BYTES = {"cpu": 32 * 2**20, "accelerator": 128 * 2**20}
WEIGHT_SLICE = 16_384  # rows of dW per partial GEMM, where a GEMM cannot accumulate into fp32


class HeadAdapter(NamedTuple):
    """Terms and factors that an adapter of the head applies to the logits X Wᵀ of N rows; None: absent."""

    inputs: Tensor | None = None  # U [N, r], in the dtype of X
    factor: Tensor | None = None  # B [V, r]
    columns: Tensor | None = None  # c [V], fp32 (fp64 for fp64 logits)
    token_rows: Tensor | None = None  # R [T, H]
    tokens: Tensor | None = None  # t, int64 [T], distinct

    def at(self, rows: Tensor | slice) -> HeadAdapter:
        """Return the adapter for some rows of X."""
        return self if self.inputs is None else self._replace(inputs=self.inputs[rows])

    def cast(self, dtype: torch.dtype) -> HeadAdapter:
        """Return the adapter with the factors of the GEMMs in `dtype`."""
        gemm_factors = (self.inputs, self.factor, self.token_rows)
        inputs, factor, token_rows = (None if tensor is None else tensor.to(dtype) for tensor in gemm_factors)
        return HeadAdapter(inputs, factor, self.columns, token_rows, self.tokens)


NO_ADAPTER = HeadAdapter()


class Needed(NamedTuple):
    """Which gradients to compute."""

    hidden: bool = False
    weight: bool = False
    inputs: bool = False
    factor: bool = False
    columns: bool = False
    token_rows: bool = False

    @property
    def sums(self) -> bool:
        """Whether a gradient that is summed over rows is among them."""
        return self.weight or self.factor or self.columns or self.token_rows


class HeadGradients(NamedTuple):
    """Gradients, each in its tensor's dtype and summed in fp32 (fp64 for fp64 input); None if not needed."""

    hidden: Tensor | None  # [N, H]
    weight: Tensor | None  # [V, H]
    inputs: Tensor | None = None  # [N, r]
    factor: Tensor | None = None  # [V, r]
    columns: Tensor | None = None  # [V]
    token_rows: Tensor | None = None  # [T, H]


def check_adapter(hidden: Tensor, weight: Tensor, adapter: HeadAdapter) -> None:
    """Raise a ModelError that names the tensor of an adapter whose shape does not fit X [N, H] and W [V, H]."""
    rank = 0 if adapter.factor is None else adapter.factor.shape[-1]
    count = 0 if adapter.tokens is None else len(adapter.tokens)
    shapes: tuple[tuple[int, ...], ...] = (
        (len(hidden), rank), (len(weight), rank), (len(weight),), (count, weight.shape[1]), (count,),
    )  # fmt: skip
    for name, tensor, shape in zip(HeadAdapter._fields, adapter, shapes, strict=True):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ModelError(f"the head's adapter: {name} is {list(tensor.shape)}, not {list(shape)}")
    for first, second in (("inputs", "factor"), ("token_rows", "tokens")):
        if (getattr(adapter, first) is None) != (getattr(adapter, second) is None):
            raise ModelError(f"the head's adapter has one of {first} and {second}", "give both")


def chunk_rows(vocabulary: int, device_type: str, itemsize: int = 4) -> int:
    """Tokens per chunk, so that its logits fit in `LOGITS_CHUNK_BYTES` of the device type.

    On an accelerator, chunks are multiples of a GEMM's tile of 128 rows and logits have the head's dtype. A CPU
    computes a chunk in fp32.
    """
    if device_type == "cpu":
        return max(LOGITS_CHUNK_BYTES["cpu"] // (4 * vocabulary) // 64 * 64, 64)
    return max(LOGITS_CHUNK_BYTES["accelerator"] // (itemsize * vocabulary) // 128 * 128, 128)


def head_logits(x: Tensor, weight: Tensor, adapter: HeadAdapter = NO_ADAPTER) -> Tensor:
    """Z [n, V] for x [n, H] in x's dtype: the specification, differentiable."""
    adapter = adapter.cast(x.dtype)
    logits = x @ weight.to(x.dtype).T
    if adapter.inputs is not None and adapter.factor is not None:
        logits = logits + adapter.inputs @ adapter.factor.T
    if adapter.columns is not None:
        logits = (logits * adapter.columns).to(x.dtype)
    if adapter.token_rows is not None and adapter.tokens is not None:
        logits = logits.index_copy(1, adapter.tokens, x @ adapter.token_rows.T)
    return logits


class HeadRows:
    """Computes the logits of some rows of X at a time, in one buffer.

    Args:
        hidden: X [N, H]; the GEMMs run in its dtype.
        weight: W [V, H], any float dtype.
        adapter: of the head, for the N rows.
        chunk: largest number of rows at a time.
        ignored: [N] bool; these rows are zero in X and U, even if they hold NaN. None: no row is.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, adapter: HeadAdapter, chunk: int, ignored: Tensor | None = None
    ) -> None:
        self.hidden = hidden
        self.weight = weight.to(hidden.dtype)
        self.adapter = adapter.cast(hidden.dtype)
        self.ignored = ignored
        # rows of a multiple of 16 elements, for vector loads and GEMMs
        columns = -(-len(weight) // 16) * 16
        padded = hidden.new_empty(min(chunk, len(hidden)), columns)
        self.buffer = padded[:, : len(weight)]
        # oneDNN (torch 2.13, processors with AMX) reads bf16 operands beyond their last column: NaN · 0 = NaN
        padded[:, len(weight) :].zero_()

    def at(self, rows: slice) -> tuple[Tensor, HeadAdapter]:
        """Return x [n, H] and the adapter of some rows."""
        x, adapter = self.hidden[rows], self.adapter.at(rows)
        if self.ignored is None:
            return x, adapter
        ignored = self.ignored[rows].unsqueeze(1)
        inputs = None if adapter.inputs is None else adapter.inputs.masked_fill(ignored, 0.0)
        return x.masked_fill(ignored, 0.0), adapter._replace(inputs=inputs)

    def logits(self, x: Tensor, adapter: HeadAdapter, unscaled: Tensor | None = None) -> Tensor:
        """Return the logits [n, V] of a result of `at`; `unscaled` [n, V] gets them before they are scaled by c.

        They are in the buffer, or in a new tensor where oneDNN is faster.
        """
        logits = linear_into(self.buffer[: len(x)], x, self.weight)
        if adapter.inputs is not None and adapter.factor is not None:
            logits.addmm_(adapter.inputs, adapter.factor.t())
        if adapter.columns is not None:
            if unscaled is not None:
                unscaled.copy_(logits)
            logits.mul_(adapter.columns)
        if adapter.token_rows is not None and adapter.tokens is not None:
            logits.index_copy_(1, adapter.tokens, x @ adapter.token_rows.t())
        return logits


def products_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    ignored: Tensor | None,
    into_gradient: Callable[[Tensor, slice], None],
    needed: Needed,
    chunk: int,
    adapter: HeadAdapter = NO_ADAPTER,
) -> HeadGradients:
    """Compute logits of `chunk` rows at a time, apply `into_gradient`, and accumulate the gradients.

    Args:
        hidden, weight, adapter: as in `HeadRows`.
        ignored: [N] bool; these rows do not enter sums over rows, even if they hold NaN. None: all rows enter.
        into_gradient: overwrites the logits of a slice of rows by the gradient of their loss.
    """
    head = HeadRows(hidden, weight, adapter, chunk, ignored if needed.sums else None)
    totals = _totals(hidden, weight, adapter, needed)
    unscaled = torch.empty_like(head.buffer) if totals.columns is not None else None
    for start in range(0, max(len(hidden), 1), chunk):  # one empty chunk if there are no rows
        rows = slice(start, start + chunk)
        x, terms = head.at(rows)
        logits = head.logits(x, terms, None if unscaled is None else unscaled[: len(x)])
        into_gradient(logits, rows)
        by_tokens = None
        if terms.tokens is not None:
            by_tokens = logits.index_select(1, terms.tokens)
            logits.index_fill_(1, terms.tokens, 0.0)
            if totals.token_rows is not None:
                _add_product(totals.token_rows, by_tokens.T, x)
        if terms.columns is not None:
            if totals.columns is not None and unscaled is not None:
                totals.columns.add_(column_dots(logits, unscaled[: len(x)]))
            logits.mul_(terms.columns)
        if totals.inputs is not None and terms.factor is not None:
            torch.mm(logits, terms.factor, out=totals.inputs[rows])
        if totals.factor is not None and terms.inputs is not None:
            _add_product(totals.factor, logits.T, terms.inputs)
        if totals.hidden is not None:
            into = totals.hidden[rows]
            if (product := linear_into(into, logits, head.weight.t())) is not into:
                into.copy_(product)
            if by_tokens is not None and terms.token_rows is not None:
                into.addmm_(by_tokens, terms.token_rows)
        if totals.weight is not None:
            _add_product(totals.weight, logits.T, x)
        del logits  # free it before the next chunk, where it is not the buffer
    tensors = (hidden, weight, *adapter[:4])
    return HeadGradients(
        *(
            None if total is None or tensor is None else total.to(tensor.dtype)
            for total, tensor in zip(totals, tensors, strict=True)
        )
    )


def _totals(hidden: Tensor, weight: Tensor, adapter: HeadAdapter, needed: Needed) -> HeadGradients:
    """Return the tensors that the needed gradients are written to, by rows, or added to, in fp32."""
    exact = torch.promote_types(hidden.dtype, torch.float32)

    def sums(tensor: Tensor | None, need: bool) -> Tensor | None:
        return torch.zeros_like(tensor, dtype=exact) if need and tensor is not None else None

    return HeadGradients(
        torch.empty_like(hidden) if needed.hidden else None,
        sums(weight, needed.weight),
        torch.empty_like(adapter.inputs) if needed.inputs and adapter.inputs is not None else None,
        sums(adapter.factor, needed.factor),
        sums(adapter.columns, needed.columns),
        sums(adapter.token_rows, needed.token_rows),
    )


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
