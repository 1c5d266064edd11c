"""Mamba-2's scan over sequences in chunks, forward and backward, as batched matmuls: the specification.

    S_t = e^(a_t)·S_(t−1) + Δ_t·B_t ⊗ x_t,    y_t = S_tᵀ·C_t + D·x_t

for each head (Dao & Gu 2024, arXiv:2405.21060, section 6). For a chunk of tokens with initial state S and the sums
A_i = Σ_(j≤i) a_j over a document's tokens in the chunk:

    y_i = e^(A_i)·Sᵀ·C_i + Σ_(j≤i) e^(A_i − A_j)·(C_i·B_j)·Δ_j·x_j + D·x_i
    S  ← e^(A_last)·S + Σ_j e^(A_last − A_j)·Δ_j·B_j ⊗ x_j

Where a document starts, S is 0 and A restarts; every term across the boundary is an exact 0. Arithmetic is fp32 (fp64
for fp64 input); states between chunks are rounded to x's dtype, in which they are multiplied.

Shapes: R rows of T tokens, H heads of P values, G groups of N state values (G divides H; a group serves H/G adjacent
heads), n chunks of `CHUNK` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op

CHUNK = 64  # tokens


class ScanGradients(NamedTuple):
    """Gradients of the scan's inputs, each in its input's shape and dtype, except `b` and `c` in fp32 (fp64)."""

    x: Tensor
    step: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor


def _chunked(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rearrange [R, T, H, ·] to [n, R, H, CHUNK, ·], padded with zeros."""
    return F.pad(x.to(dtype), (0, 0, 0, 0, 0, -x.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """Rearrange [n, R, H, CHUNK, ·] to contiguous [R, T, H, ·], without padding."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :tokens].contiguous()


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Split heads [n, R, H, ...] into groups [n, R, G, H/G, ...]."""
    return x.unflatten(2, (groups, -1))


class _Decays(NamedTuple):
    """Decays within chunks; exact zeros separate documents.

    Attributes:
        pairs: e^(A_i − A_j) [n, R, H, CHUNK, CHUNK], 0 for j > i.
        visible: bool [n, R, 1, CHUNK, CHUNK], whether token i reads token j.
        start: e^(A_i) [n, R, H, CHUNK, 1], the factor of the chunk's initial state in token i.
        end: e^(A_last − A_i) [n, R, H, CHUNK, 1], the factor of token i in the chunk's final state.
        through: e^(A_last) [n, R, H, 1, 1], the factor of the initial state in the final one.
    """

    pairs: Tensor
    visible: Tensor
    start: Tensor
    end: Tensor
    through: Tensor


def _visible(begins: Tensor) -> tuple[Tensor, Tensor]:
    """bool [n, R, 1, CHUNK, CHUNK], whether token i reads token j; bool [n, R, 1, CHUNK, 1], whether token i's
    document began before its chunk. Padding belongs to the row's last document, and its values are 0."""
    rows, tokens = begins.shape
    padding = -tokens % CHUNK
    index = torch.arange(tokens + padding, device=begins.device)
    own = (torch.arange(rows, device=begins.device) * tokens).unsqueeze(1) + index
    begins = torch.cat([begins, begins[:, -1:].expand(rows, padding)], 1)
    own, begins = (x.unflatten(1, (-1, CHUNK)).transpose(0, 1).unsqueeze(2) for x in (own, begins))
    reads = own.unsqueeze(-2) <= own.unsqueeze(-1)
    same_document = own.unsqueeze(-2) >= begins.unsqueeze(-1)
    return reads & same_document, (begins < own[..., :1]).unsqueeze(-1)


def _decays(decay: Tensor, begins: Tensor, dtype: torch.dtype) -> _Decays:
    visible, continued = _visible(begins)
    decay = _chunked(decay.unsqueeze(-1), dtype).mT
    sums = decay.expand(*decay.shape[:-2], CHUNK, CHUNK).masked_fill(~visible, 0).sum(-1)
    pairs = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(~visible, -torch.inf).exp_()
    start = sums.exp().unsqueeze(-1) * continued
    return _Decays(pairs, visible, start, pairs[..., -1:, :].mT, start[..., -1:, :])


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@op("triton.chunk_scan")
def chunk_states(x: Tensor, step: Tensor, decay: Tensor, b: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, [n, R, H, N, P] in x's dtype, and the final states [R, H, N, P] in fp32.

    Args:
        x: [R, T, H, P].
        step: Δ, fp32 [R, T, H]; fp64 for fp64 x.
        decay: a = A·Δ ≤ 0, as `step`.
        b: [R, T, G, N] in x's dtype.
        begins: int32 [R, T], the first token of each token's document, counted over all rows.
    """
    exact, groups = _exact(x), b.shape[2]
    decays = _decays(decay, begins, exact)
    inputs = _chunked(x, exact) * _chunked(step.unsqueeze(-1), exact) * decays.end
    added = (_chunked(b, exact).mT.unsqueeze(3) @ _grouped(inputs, groups)).flatten(2, 3)
    states = torch.empty(added.shape, dtype=x.dtype, device=x.device)
    state = torch.zeros_like(added[0])
    for chunk in range(len(added)):
        states[chunk] = state
        state = added[chunk].add_(state * decays.through[chunk])
    return states, state


@op("triton.chunk_scan")
def chunk_outputs(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, begins: Tensor, states: Tensor
) -> Tensor:
    """Return y [R, T, H, P] in x's dtype.

    Args:
        c: [R, T, G, N] in x's dtype.
        skip: D [H], any float dtype; None: 0.
        states: of `chunk_states`, whose arguments the others are.
    """
    exact, groups, tokens = _exact(x), b.shape[2], x.shape[1]
    decays = _decays(decay, begins, exact)
    by_chunk, queries = _chunked(x, exact), _chunked(c, exact)
    scores = (queries @ _chunked(b, exact).mT).unsqueeze(3) * _grouped(decays.pairs, groups)
    y = scores.flatten(2, 3) @ (by_chunk * _chunked(step.unsqueeze(-1), exact))
    y += (queries.unsqueeze(3) @ _grouped(states.to(exact), groups)).flatten(2, 3) * decays.start
    if skip is not None:
        y += skip.to(exact)[:, None, None] * by_chunk
    return _by_token(y, tokens).to(x.dtype)


@op("triton.chunk_scan")
def chunk_state_gradients(grad: Tensor, decay: Tensor, c: Tensor, begins: Tensor) -> Tensor:
    """Return the gradient of the state after each chunk, [n, R, H, N, P] in grad's dtype.

    Args:
        grad: gradient of y, [R, T, H, P]; the others as in `chunk_outputs`.
    """
    exact, groups = _exact(grad), c.shape[2]
    decays = _decays(decay, begins, exact)
    read = _grouped(_chunked(grad, exact) * decays.start, groups)
    added = (_chunked(c, exact).mT.unsqueeze(3) @ read).flatten(2, 3)
    gradients = torch.empty(added.shape, dtype=grad.dtype, device=grad.device)
    gradient = torch.zeros_like(added[0])
    for chunk in reversed(range(len(added))):
        gradients[chunk] = gradient
        gradient = added[chunk].add_(gradient * decays.through[chunk])
    return gradients


@op("triton.chunk_scan")
def chunk_gradients(
    grad: Tensor,
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    begins: Tensor,
    states: Tensor,
    state_gradients: Tensor,
) -> ScanGradients:
    """Return the gradients of the scan's inputs.

    Args:
        grad: gradient of y, [R, T, H, P] in x's dtype.
        states: of `chunk_states`; state_gradients: of `chunk_state_gradients`; the others as there.
    """
    exact, groups, tokens = _exact(x), b.shape[2], x.shape[1]
    decays = _decays(decay, begins, exact)
    grad_y, by_chunk, steps = _chunked(grad, exact), _chunked(x, exact), _chunked(step.unsqueeze(-1), exact)
    keys, queries = _chunked(b, exact), _chunked(c, exact)
    state, after = _grouped(states.to(exact), groups), _grouped(state_gradients.to(exact), groups)
    inputs, pairs = by_chunk * steps, _grouped(decays.pairs, groups)
    scores = ((queries @ keys.mT).unsqueeze(3) * pairs).flatten(2, 3)
    read = (queries.unsqueeze(3) @ state).flatten(2, 3) * decays.start
    added = (keys.unsqueeze(3) @ after).flatten(2, 3) * decays.end
    grad_inputs = scores.mT @ grad_y + added
    grad_scores = grad_y @ inputs.mT
    grad_sums = (grad_scores * scores).sum(-1) - (grad_scores * scores).sum(-2)
    grad_sums += (read * grad_y).sum(-1) - (added * inputs).sum(-1)
    last = (added * inputs).sum((-1, -2)) + ((state * after).sum((-1, -2)).flatten(2, 3) * decays.through[..., 0, 0])
    grad_sums[..., -1] += last
    grad_decay = (grad_sums.unsqueeze(-1) * decays.visible).sum(-2)
    products = (_grouped(grad_scores, groups) * pairs).sum(3)
    from_states = (_grouped(grad_y * decays.start, groups) @ state.mT).sum(3)
    from_after = (_grouped(inputs * decays.end, groups) @ after.mT).sum(3)
    grad_x = grad_inputs * steps
    if skip is not None:
        grad_x += skip.to(exact)[:, None, None] * grad_y
    return ScanGradients(
        _by_token(grad_x, tokens).to(x.dtype),
        _by_token((grad_inputs * by_chunk).sum(-1, keepdim=True), tokens).squeeze(-1).to(step.dtype),
        _by_token(grad_decay.unsqueeze(-1), tokens).squeeze(-1).to(decay.dtype),
        _by_token(products.mT @ queries + from_after, tokens),
        _by_token(products @ keys + from_states, tokens),
    )
