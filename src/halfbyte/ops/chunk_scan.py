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


class Factors(NamedTuple):
    """Factors of tokens within their chunks, in the order in which `chunk_factors` stacks them; padding has 0.

    Attributes:
        sums: A_i.
        start: e^(A_i), the factor of the chunk's initial state in token i; 0 if its document starts in the chunk.
        end: e^(A_last − A_i), the factor of token i in the chunk's final state; 0 if its document ends before.
        through: e^(A_last), the factor of the initial state in the final one, for every token of the chunk.
        step: Δ.
        end_step: end·Δ.
    """

    sums: Tensor
    start: Tensor
    end: Tensor
    through: Tensor
    step: Tensor
    end_step: Tensor


def _visible(begins: Tensor) -> tuple[Tensor, Tensor]:
    """bool [R, n, CHUNK, CHUNK], whether token i reads token j; bool [R, n, CHUNK], whether token i's document began
    before its chunk. Padding belongs to the row's last document, and its values are 0."""
    rows, tokens = begins.shape
    padding = -tokens % CHUNK
    index = torch.arange(tokens + padding, device=begins.device)
    index = (torch.arange(rows, device=begins.device) * tokens).unsqueeze(1) + index
    begins = torch.cat([begins, begins[:, -1:].expand(rows, padding)], 1)
    index, begins = index.unflatten(1, (-1, CHUNK)), begins.unflatten(1, (-1, CHUNK))
    reads = index.unsqueeze(-2) <= index.unsqueeze(-1)
    same_document = index.unsqueeze(-2) >= begins.unsqueeze(-1)
    return reads & same_document, begins < index[..., :1]


@op("triton.chunk_scan")
def chunk_factors(step: Tensor, decay: Tensor, begins: Tensor) -> Tensor:
    """Return the `Factors` of all chunks, stacked [6, R, H, n, CHUNK] in step's dtype.

    Args:
        step: Δ [R, T, H], fp32 or fp64.
        decay: a = A·Δ ≤ 0, as `step`.
        begins: int32 [R, T], the first token of each token's document, counted over all rows.
    """
    visible, continued = (x.unsqueeze(1) for x in _visible(begins))
    step, decay = (_chunked(x.unsqueeze(-1), x.dtype).permute(1, 2, 0, 3, 4).squeeze(-1) for x in (step, decay))
    sums = decay.unsqueeze(-2).masked_fill(~visible, 0).sum(-1)
    last = sums[..., -1:]
    end = (last - sums).masked_fill(~visible[..., -1, :], -torch.inf).exp()
    start = sums.exp() * continued
    return torch.stack([sums, start, end, start[..., -1:].expand_as(sums), step, end * step])


def _columns(factors: Tensor) -> Factors:
    """Rearrange `chunk_factors` to columns [n, R, H, CHUNK, 1]."""
    return Factors(*factors.permute(0, 3, 1, 2, 4).unsqueeze(-1))


def _pairs(sums: Tensor, visible: Tensor) -> Tensor:
    """e^(A_i − A_j) [n, R, H, CHUNK, CHUNK] from columns; 0 where token i does not read token j."""
    return (sums - sums.mT).masked_fill(~visible, -torch.inf).exp()


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@op("triton.chunk_scan")
def chunk_states(x: Tensor, factors: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, [n, R, H, N, P] in x's dtype, and the final states [R, H, N, P] in fp32.

    Args:
        x: [R, T, H, P].
        factors: of `chunk_factors`.
        b: [R, T, G, N] in x's dtype.
    """
    exact, groups = _exact(x), b.shape[2]
    columns = _columns(factors)
    inputs = _chunked(x, exact) * columns.end_step
    added = (_chunked(b, exact).mT.unsqueeze(3) @ _grouped(inputs, groups)).flatten(2, 3)
    states = torch.empty(added.shape, dtype=x.dtype, device=x.device)
    state = torch.zeros_like(added[0])
    for chunk in range(len(added)):
        states[chunk] = state
        state = added[chunk].add_(state * columns.through[chunk, :, :, :1])
    return states, state


@op("triton.chunk_scan")
def chunk_outputs(
    x: Tensor, factors: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, begins: Tensor, states: Tensor
) -> Tensor:
    """Return y [R, T, H, P] in x's dtype.

    Args:
        c: [R, T, G, N] in x's dtype.
        skip: D [H], any float dtype; None: 0.
        begins: as in `chunk_factors`; states: of `chunk_states`, whose arguments the others are.
    """
    exact = _exact(x)
    groups = b.shape[2]
    tokens = x.shape[1]
    columns = _columns(factors)
    pairs = _pairs(columns.sums, _visible(begins)[0].transpose(0, 1).unsqueeze(2))
    by_chunk, queries = _chunked(x, exact), _chunked(c, exact)
    scores = (queries @ _chunked(b, exact).mT).unsqueeze(3) * _grouped(pairs, groups)
    y = scores.flatten(2, 3) @ (by_chunk * columns.step)
    y += (queries.unsqueeze(3) @ _grouped(states.to(exact), groups)).flatten(2, 3) * columns.start
    if skip is not None:
        y += skip.to(exact)[:, None, None] * by_chunk
    return _by_token(y, tokens).to(x.dtype)


@op("triton.chunk_scan")
def chunk_state_gradients(grad: Tensor, factors: Tensor, c: Tensor) -> Tensor:
    """Return the gradient of the state after each chunk, [n, R, H, N, P] in grad's dtype.

    Args:
        grad: gradient of y, [R, T, H, P]; the others as in `chunk_outputs`.
    """
    exact, groups = _exact(grad), c.shape[2]
    columns = _columns(factors)
    read = _grouped(_chunked(grad, exact) * columns.start, groups)
    added = (_chunked(c, exact).mT.unsqueeze(3) @ read).flatten(2, 3)
    gradients = torch.empty(added.shape, dtype=grad.dtype, device=grad.device)
    gradient = torch.zeros_like(added[0])
    for chunk in reversed(range(len(added))):
        gradients[chunk] = gradient
        gradient = added[chunk].add_(gradient * columns.through[chunk, :, :, :1])
    return gradients


@op("triton.chunk_scan")
def chunk_gradients(
    grad: Tensor,
    x: Tensor,
    factors: Tensor,
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
    exact = _exact(x)
    groups = b.shape[2]
    tokens = x.shape[1]
    columns, visible = _columns(factors), _visible(begins)[0].transpose(0, 1).unsqueeze(2)
    grad_y, by_chunk, keys, queries = (_chunked(tensor, exact) for tensor in (grad, x, b, c))
    state, later = _grouped(states.to(exact), groups), _grouped(state_gradients.to(exact), groups)
    inputs, pairs = by_chunk * columns.step, _grouped(_pairs(columns.sums, visible), groups)
    scores = ((queries @ keys.mT).unsqueeze(3) * pairs).flatten(2, 3)
    from_state = (queries.unsqueeze(3) @ state).flatten(2, 3) * columns.start
    to_state = (keys.unsqueeze(3) @ later).flatten(2, 3) * columns.end
    grad_inputs = scores.mT @ grad_y + to_state
    grad_scores = grad_y @ inputs.mT
    grad_sums = (grad_scores * scores).sum(-1) - (grad_scores * scores).sum(-2)
    grad_sums += (from_state * grad_y).sum(-1) - (to_state * inputs).sum(-1)
    through = (state * later).sum((-1, -2)).flatten(2, 3) * columns.through[..., 0, 0]
    grad_sums[..., -1] += (to_state * inputs).sum((-1, -2)) + through
    grad_decay = (grad_sums.unsqueeze(-1) * visible).sum(-2)
    products = (_grouped(grad_scores, groups) * pairs).sum(3)
    grad_c = (_grouped(grad_y * columns.start, groups) @ state.mT).sum(3) + products @ keys
    grad_b = (_grouped(by_chunk * columns.end_step, groups) @ later.mT).sum(3) + products.mT @ queries
    grad_x = grad_inputs * columns.step
    if skip is not None:
        grad_x += skip.to(exact)[:, None, None] * grad_y
    return ScanGradients(
        _by_token(grad_x, tokens).to(x.dtype),
        _by_token((grad_inputs * by_chunk).sum(-1, keepdim=True), tokens).squeeze(-1).to(factors.dtype),
        _by_token(grad_decay.unsqueeze(-1), tokens).squeeze(-1).to(factors.dtype),
        _by_token(grad_b, tokens),
        _by_token(grad_c, tokens),
    )
