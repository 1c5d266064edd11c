"""The gated delta rule over sequences in chunks, forward and backward, as batched matmuls.

    S ← e^g·S,  then  S ← S + k ⊗ β·(v − Sᵀk),  out = Sᵀq

(Yang et al. 2025, arXiv:2412.06464, equation 10), for each value head. For a chunk of C tokens with initial state S and
cumulative sums G of g (section 3.3 there):

    Δ_i + β_i·Σ_{j<i} e^(G_i − G_j)·(k_i·k_j)·Δ_j = β_i·(v_i − e^(G_i)·Sᵀk_i)         (I + A)·Δ = β·V − (β·e^G·K)·S
    out_i = e^(G_i)·Sᵀq_i + Σ_{j≤i} e^(G_i − G_j)·(q_i·k_j)·Δ_j                       e^G·Q·S + P·Δ
    S ← e^(G_C)·S + Σ_j e^(G_C − G_j)·k_j ⊗ Δ_j

All that does not depend on S is computed for all chunks at once: T = (I + A)⁻¹, U = T·β·V and W = T·β·e^G·K. Then
Δ = U − W·S. With K' = e^(G_C − G)·K each chunk is one matmul, S ← M·S + K'ᵀ·U, where M = e^(G_C)·I − K'ᵀ·W. Backward
uses Mᵀ. Arithmetic is fp32 (fp64 for fp64 input).

Where a document starts inside a sequence, S is 0: G restarts there, and every term across the boundary is an exact 0.

Backward recomputes all of this: a layer saves only q, k, v, g and β. On GPUs both passes are kernels
(`kernels/triton/delta_rule.py`); this module is the specification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op

CHUNK = 64  # tokens
LEAST = 8  # rows of the blocks that are inverted as sums of powers, at the cost of at most one digit of precision
# Tokens times value heads that are computed at once; each needs up to 18 KB of temporary memory with heads of 128.
AT_ONCE = 1 << 17
EPSILON = 1e-6  # added to the sum of squares in the norms of q and k


class Rows(NamedTuple):
    """Inputs of the rule. Hk divides Hv, and a key head serves Hv/Hk adjacent value heads.

    Attributes:
        query, key: [D, L, Hk, Dk], not normalised; the rule normalises them and divides q by √Dk.
        value: [D, L, Hv, Dv].
        decay, beta: g ≤ 0 and β, [D, L, Hv]; both 0 for padding.
        first: bool [D, L], whether a document starts at the token; None: each sequence is one document.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    first: Tensor | None = None


def parts_of(rows: Rows, at_once: int) -> list[Rows]:
    """Split the inputs by key heads, so that each part has at most `at_once` tokens times value heads."""
    count, heads = rows.value.shape[:3].numel(), rows.key.shape[2]
    count_of_groups = min(-(-count // at_once), heads)
    tensors = rows.query, rows.key, rows.value, rows.decay, rows.beta
    split = zip(*(x.tensor_split(count_of_groups, 2) for x in tensors), strict=True)
    return [Rows(*tensors_of_group)._replace(first=rows.first) for tensors_of_group in split]


class _Chunks(NamedTuple):
    """Intermediate tensors of all n chunks, [n, D, H, g, C, ·] unless noted; H key heads serve g value heads each.

    Attributes:
        query, key: normalised, q divided by √Dk, [n, D, H, 1, C, Dk].
        value: [.., Dv].
        beta, start_decay, end_decay: β, e^G and e^(G_C − G) [.., 1].
        pair_decay: e^(G_i − G_j) [.., C, C], 0 above the diagonal.
        key_products: k_i·k_j [n, D, H, 1, C, C].
        a, inverse, p: A, T and P [.., C, C].
        u, w: U and W.
        end_key: K' = e^(G_C − G)·K.
        masked: bool, broadcastable to [.., C, C]: True where a token does not depend on another.
        boundaries: document boundaries; None: each sequence is one document.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    start_decay: Tensor
    end_decay: Tensor
    pair_decay: Tensor
    key_products: Tensor
    a: Tensor
    inverse: Tensor
    p: Tensor
    u: Tensor
    w: Tensor
    end_key: Tensor
    masked: Tensor
    boundaries: _Boundaries | None

    @property
    def chunk_decay(self) -> Tensor:
        """e^(G_C) [n, D, H, g, 1, 1]."""
        return self.start_decay[..., -1:, :]


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Normalise x [..., K] to length one; also return the factor [..., 1]."""
    rstd = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPSILON)
    return x * rstd, rstd


def inverse(lower: Tensor) -> Tensor:
    """(I + A)⁻¹ for strictly lower triangular A [..., C, C], C a power of two and at least `LEAST`.

    Inverts diagonal blocks by (I − A)(I + A²)(I + A⁴), since A⁸ = 0. Then merges pairs of inverted blocks into blocks
    twice as large: the part below the diagonal is −T₂·A₂₁·T₁.
    """
    size, unit_ = lower.shape[-1], torch.eye(LEAST, dtype=lower.dtype, device=lower.device)

    def blocks(x: Tensor, width: int) -> Tensor:
        """Diagonal blocks [..., C / width, width, width]."""
        tiled = x.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
        return tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    smallest = blocks(lower, LEAST)
    square = smallest @ smallest
    inverses = (unit_ - smallest) @ (unit_ + square) @ (unit_ + square @ square)
    width = LEAST
    while width < size:
        first, second = inverses.unflatten(-3, (-1, 2)).unbind(-3)
        below_diagonal = blocks(lower, 2 * width)[..., width:, :width]
        below = -(second @ below_diagonal @ first)
        inverses = torch.cat([F.pad(first, (0, width)), torch.cat([below, second], -1)], -2)
        width *= 2
    return inverses.squeeze(-3)


def _by_chunk(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """Rearrange [D, L, H·g, ·] to [n, D, H, g, C, ·], padded with zeros."""
    short = -x.shape[1] % CHUNK
    x = F.pad(x, (0, 0, 0, 0, 0, short)) if short else x
    view = x.unflatten(1, (-1, CHUNK)).unflatten(3, (heads, -1)).permute(1, 0, 3, 4, 2, 5)
    return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """Rearrange [n, D, H, g, C, ·] to [D, L, H·g, ·], in the shape and dtype of `like`."""
    view = x.permute(1, 0, 4, 2, 3, 5)
    out = torch.empty(view.shape, dtype=like.dtype, device=x.device).copy_(view)
    return out.flatten(3, 4).flatten(1, 2)[:, : like.shape[1]].view(like.shape)


def _product(a: Tensor, b: Tensor, plus: Tensor | None = None, sign: int = 1) -> Tensor:
    """plus ± a·b of matrices [.., ·, ·], accumulated into `plus` if it is given."""
    if plus is None:
        return a @ b if sign > 0 else (a @ b).neg_()
    plus.view(-1, *plus.shape[-2:]).baddbmm_(a.flatten(0, -3), b.flatten(0, -3), alpha=sign)
    return plus


class _Boundaries(NamedTuple):
    """Document boundaries within chunks.

    Attributes:
        started: bool [n, D, C], whether the token's document starts in its chunk.
        separate: bool [n, D, C, C], whether two tokens are in different documents.
    """

    started: Tensor
    separate: Tensor

    @classmethod
    def of(cls, first: Tensor) -> _Boundaries:
        first = F.pad(first, (0, -first.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK)).transpose(0, 1)
        number = first.cumsum(-1)
        return cls(number > 0, number.unsqueeze(-1) != number.unsqueeze(-2))


def _sums(x: Tensor, masked: Tensor, dim: int, boundaries: _Boundaries | None) -> Tensor:
    """Sums [.., C] of x [.., 1, C] over each token's visible tokens (dim −1), or of x [.., C, 1] over the tokens that
    see it (dim −2).

    With document boundaries, tokens of other documents are added as exact zeros. Differences of cumulative sums would
    make a document's bits depend on its neighbours.
    """
    if boundaries is not None:
        return x.expand(*x.shape[:-2], CHUNK, CHUNK).masked_fill(masked, 0).sum(dim)
    return x.squeeze(-2).cumsum(-1) if dim == -1 else x.squeeze(-1).flip(-1).cumsum(-1).flip(-1)


def _wide(x: Tensor) -> Tensor:
    """Add the head dimensions to x [n, D, ...]: [n, D, H, g, ...]."""
    return x.unflatten(1, (-1, 1, 1))


def _chunks(rows: Rows) -> _Chunks:
    exact, heads = torch.promote_types(rows.value.dtype, torch.float32), rows.key.shape[2]
    query, key, value = (_by_chunk(x, heads, exact) for x in (rows.query, rows.key, rows.value))
    query, key = unit(query)[0].mul_(query.shape[-1] ** -0.5), unit(key)[0]
    decay, beta = (_by_chunk(x.unsqueeze(-1), heads, exact) for x in (rows.decay, rows.beta))
    boundaries = None if rows.first is None else _Boundaries.of(rows.first)
    masked = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    masked = masked if boundaries is None else _wide(masked | boundaries.separate)
    sums = _sums(decay.mT, masked, -1, boundaries)
    pair_decay = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(masked, -torch.inf).exp_()
    start_decay, end_decay = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    if boundaries is not None:
        start_decay = start_decay.masked_fill_(_wide(boundaries.started).unsqueeze(-1), 0)
        end_decay = end_decay.masked_fill_(_wide(boundaries.separate[..., -1]).unsqueeze(-1), 0)
    key_products = key @ key.mT
    a = (pair_decay * key_products).mul_(beta).tril_(-1)
    t = inverse(a)
    u = (t * beta.mT) @ value
    w = ((t * (beta * start_decay).mT).flatten(3, 4) @ key.squeeze(3)).unflatten(3, beta.shape[3:5])
    p, end_key = pair_decay * (query @ key.mT), key * end_decay
    tensors = query, key, value, beta, start_decay, end_decay, pair_decay, key_products, a, t, p
    return _Chunks(*tensors, u, w, end_key, masked, boundaries)


def _transitions(chunks: _Chunks) -> Tensor:
    """M [.., Dk, Dk]."""
    matrices = _product(chunks.end_key.mT, chunks.w, sign=-1)
    matrices.diagonal(dim1=-2, dim2=-1).add_(chunks.chunk_decay[..., 0])
    return matrices


def _states(chunks: _Chunks, matrices: Tensor) -> Tensor:
    """State before each chunk and after the last one, [n + 1, D, H, g, Dk, Dv]; the first is zero."""
    states = chunks.u.new_empty(len(matrices) + 1, *matrices.shape[1:-1], chunks.u.shape[-1])
    states[0] = 0
    torch.matmul(chunks.end_key.mT, chunks.u, out=states[1:])
    for at, matrix in enumerate(matrices):
        _product(matrix, states[at], states[at + 1])
    return states


def _states_backward(direct: Tensor, matrices: Tensor) -> Tensor:
    """Gradients of the states after each chunk; `direct` [.., Dk, Dv]: direct gradients of the states before it."""
    after_chunk = torch.cat([direct[1:], torch.zeros_like(direct[:1])])
    for at in reversed(range(1, len(matrices))):
        _product(matrices[at].mT, after_chunk[at], after_chunk[at - 1])
    return after_chunk


@op("triton.delta_rule")
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule from a state of zero; arguments as in `Rows`.

    Returns:
        out [D, L, Hv, Dv] in the value's dtype, and the final states [D, Hv, Dk, Dv] in fp32 (fp64).
    """
    return forward_in_parts(_forward, Rows(query, key, value, decay, beta, first), AT_ONCE)


@op("triton.delta_rule")
def delta_rule_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    first: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of `delta_rule`'s first five arguments, each in its argument's dtype.

    Args:
        grad: gradient of out [D, L, Hv, Dv].
    """
    return backward_in_parts(_backward, grad, Rows(query, key, value, decay, beta, first), AT_ONCE)


def forward_in_parts(
    forward: Callable[[Rows], tuple[Tensor, Tensor]], rows: Rows, at_once: int
) -> tuple[Tensor, Tensor]:
    """Run `forward` on parts of the heads, as `parts_of` makes them; join outs and final states."""
    outs, states = zip(*map(forward, parts_of(rows, at_once)), strict=True)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), torch.cat(states, 1)


def backward_in_parts(
    backward: Callable[[Tensor, Rows], tuple[Tensor, ...]], grad: Tensor, rows: Rows, at_once: int
) -> tuple[Tensor, ...]:
    """Run `backward` on parts of the heads, as `parts_of` makes them; join the gradients."""
    parts = parts_of(rows, at_once)
    grads = grad.split([part.value.shape[2] for part in parts], 2)
    by_input = zip(*map(backward, grads, parts), strict=True)
    return tuple(x[0] if len(x) == 1 else torch.cat(x, 2) for x in by_input)


def _forward(rows: Rows) -> tuple[Tensor, Tensor]:
    """Out and final states, as `delta_rule`."""
    chunks = _chunks(rows)
    states = _states(chunks, _transitions(chunks))
    state = states[:-1]
    change = _product(chunks.w, state, chunks.u, -1)
    out = _product(chunks.query * chunks.start_decay, state, chunks.p @ change)
    return _by_token(out, rows.value), states[-1].flatten(1, 2)


def _backward(grad: Tensor, rows: Rows) -> tuple[Tensor, ...]:
    """Gradients, as `delta_rule_backward`."""
    chunks = _chunks(rows)
    matrices, start_query = _transitions(chunks), chunks.query * chunks.start_decay
    state = _states(chunks, matrices)[:-1]
    grad = _by_chunk(grad, rows.key.shape[2], state.dtype)
    change, direct = _product(chunks.w, state, chunks.u.clone(), -1), chunks.p.mT @ grad
    state_gradients = _states_backward(_product(chunks.w.mT, direct, start_query.mT @ grad, -1), matrices)
    del matrices
    d_change = _product(chunks.end_key, state_gradients, direct)
    d_value, d_w_key = chunks.inverse.mT @ d_change, chunks.inverse.mT @ _product(d_change, state.mT, sign=-1)
    d_start_query = grad @ state.mT
    d_end_key = change @ state_gradients.mT
    d_p = grad @ change.mT
    d_chunk = (chunks.chunk_decay * state_gradients).mul_(state).sum((-1, -2))
    del state, state_gradients, change, d_change, direct, grad
    d_a = _product(d_value, chunks.u.mT, _product(d_w_key, chunks.w.mT, sign=-1), -1).tril_(-1)
    d_log_decay = (d_a * chunks.a).addcmul_(d_p, chunks.p)
    d_scores = d_p.mul_(chunks.pair_decay).sum(3, keepdim=True)
    d_a *= chunks.pair_decay
    d_beta = (d_a * chunks.key_products).sum(-1) + (d_value * chunks.value).sum(-1)
    d_products = d_a.mul_(chunks.beta).sum(3, keepdim=True)
    d_w_key *= chunks.start_decay
    d_beta += (d_w_key * chunks.key).sum(-1)
    d_w_key *= chunks.beta
    d_end = (d_end_key * chunks.end_key).sum(-1)
    d_sums = d_log_decay.sum(-1) - d_log_decay.sum(-2) - d_end
    d_sums += (d_w_key * chunks.key).sum(-1) + (d_start_query * start_query).sum(-1)
    d_sums[..., -1] += d_end.sum(-1) + d_chunk
    d_query = d_scores @ chunks.key + (chunks.start_decay * d_start_query).sum(3, keepdim=True)
    d_key = (d_products + d_products.mT) @ chunks.key + d_scores.mT @ chunks.query
    d_key += d_w_key.addcmul_(chunks.end_decay, d_end_key).sum(3, keepdim=True)
    d_query *= chunks.query.shape[-1] ** -0.5
    d_decay = _sums(d_sums.unsqueeze(-1), chunks.masked, -2, chunks.boundaries)
    d_decay = _by_token(d_decay.unsqueeze(-1), rows.decay.unsqueeze(-1)).squeeze(-1)
    d_beta = _by_token(d_beta.unsqueeze(-1), rows.beta.unsqueeze(-1)).squeeze(-1)
    d_value *= chunks.beta
    return (
        _unit_backward(d_query, rows.query),
        _unit_backward(d_key, rows.key),
        _by_token(d_value, rows.value),
        d_decay,
        d_beta,
    )


def _unit_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of q or k [D, L, Hk, Dk] from the gradient of its normalised form, in chunks."""
    exact = _by_chunk(x, x.shape[2], grad.dtype)
    y, rstd = unit(exact)
    return _by_token((grad - y * (grad * y).sum(-1, keepdim=True)).mul_(rstd), x)
