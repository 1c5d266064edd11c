"""The gated delta rule over rows of tokens in chunks, forward and backward, as batched products of matrices.

    S ← e^g·S,  then  S ← S + k ⊗ β·(v − Sᵀk),  out = Sᵀq

(Yang et al. 2025, arXiv:2412.06464, equation 10), of each value head. Of a chunk of C tokens that begins with S, with
G the running sums of g (section 3.3 there):

    Δ_i + β_i·Σ_{j<i} e^(G_i − G_j)·(k_i·k_j)·Δ_j = β_i·(v_i − e^(G_i)·Sᵀk_i)         (I + A)·Δ = β·V − (β·e^G·K)·S
    out_i = e^(G_i)·Sᵀq_i + Σ_{j≤i} e^(G_i − G_j)·(q_i·k_j)·Δ_j                       e^G·Q·S + P·Δ
    S ← e^(G_C)·S + Σ_j e^(G_C − G_j)·k_j ⊗ Δ_j

T = (I + A)⁻¹ is made for all chunks at once, and what does not wait for S with it: U = T·β·V and W = T·β·e^G·K, so that
Δ = U − W·S, and with K' = e^(G_C − G)·K a chunk is one product, S ← M·S + K'ᵀ·U of M = e^(G_C)·I − K'ᵀ·W. Going back it
is Mᵀ. Arithmetic is fp32 (fp64 for fp64 input).

Backward makes all of this again: q, k, v, g and β are what a layer keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens
LEAST = 8  # rows of the blocks that are inverted as sums of powers, which cost no more than one digit there
EPSILON = 1e-6  # beside the squares that q and k are divided by the root of


class Rows(NamedTuple):
    """What the rule reads; Hk divides Hv, and a key head serves value heads that stand side by side.

    Attributes:
        query, key: [D, L, Hk, Dk], of any length; q is divided by √Dk.
        value: [D, L, Hv, Dv].
        decay, beta: g ≤ 0 and β, [D, L, Hv]; both 0 for a token that is not there.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


class _Chunks(NamedTuple):
    """[D, Hv, n, C, ·] of all chunks; S below is what a chunk begins with.

    Attributes:
        query, key: of length one, q over √Dk; value.
        beta: [D, Hv, n, C, 1].
        grown, left: e^G and e^(G_C − G) likewise; fade: e^(G_i − G_j) [.., C, C], 0 above the diagonal.
        mixing, inverse, seen: A, T and P [.., C, C].
        own, of_state: U and W.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    grown: Tensor
    left: Tensor
    fade: Tensor
    mixing: Tensor
    inverse: Tensor
    seen: Tensor
    own: Tensor
    of_state: Tensor

    @property
    def whole(self) -> Tensor:
        """e^(G_C) [D, Hv, n, 1, 1]."""
        return self.grown[..., -1:, :]


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] of length one, and what it was multiplied by [..., 1]."""
    rstd = torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPSILON)
    return x * rstd, rstd


def inverse(lower: Tensor) -> Tensor:
    """(I + A)⁻¹ of strictly lower triangular A [..., C, C], C a power of two from `LEAST` on.

    Blocks on the diagonal by (I − A)(I + A²)(I + A⁴), as A⁸ = 0; then twice as large ones of two that are inverted:
    what stands below the diagonal is −T₂·A₂₁·T₁.
    """
    size, unit_ = lower.shape[-1], torch.eye(LEAST, dtype=lower.dtype, device=lower.device)

    def blocks(x: Tensor, width: int) -> Tensor:
        """[..., C / width, width, width]: those on the diagonal."""
        tiled = x.unflatten(-1, (-1, width)).unflatten(-3, (-1, width))
        return tiled.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    least = blocks(lower, LEAST)
    square = least @ least
    found = (unit_ - least) @ (unit_ + square) @ (unit_ + square @ square)
    width = LEAST
    while width < size:
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        beside = blocks(lower, 2 * width)[..., width:, :width]
        below = -(second @ beside @ first)
        found = torch.cat([F.pad(first, (0, width)), torch.cat([below, second], -1)], -2)
        width *= 2
    return found.squeeze(-3)


def _by_chunk(x: Tensor, length: int) -> Tensor:
    """[D, H, n, C, ...] of [D, L, H, ...], filled up with zeros."""
    x = F.pad(x, (*(0, 0) * (x.dim() - 2), 0, length - x.shape[1]))
    return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)


def _by_token(x: Tensor, length: int) -> Tensor:
    """[D, L, H, ...] of [D, H, n, C, ...]."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def _chunks(rows: Rows) -> _Chunks:
    exact = torch.promote_types(rows.value.dtype, torch.float32)
    group = rows.value.shape[2] // rows.key.shape[2]
    length = -(-rows.value.shape[1] // CHUNK) * CHUNK
    query, key = (_by_chunk(unit(x.to(exact))[0], length).repeat_interleave(group, 1) for x in (rows.query, rows.key))
    query = query * query.shape[-1] ** -0.5
    value, beta = (_by_chunk(x.to(exact), length) for x in (rows.value, rows.beta.unsqueeze(-1)))
    sums = _by_chunk(rows.decay.to(exact), length).cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    fade = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(above, -torch.inf).exp_()
    grown, left = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    mixing = (beta * (key @ key.mT) * fade).tril_(-1)
    inverted = inverse(mixing)
    own, of_state = inverted @ (beta * value), inverted @ (beta * grown * key)
    seen = (query @ key.mT) * fade
    return _Chunks(query, key, value, beta, grown, left, fade, mixing, inverted, seen, own, of_state)


def _transitions(chunks: _Chunks, left_key: Tensor) -> Tensor:
    """M [D, Hv, n, Dk, Dk]."""
    matrices = (left_key.mT @ chunks.of_state).neg_()
    matrices.diagonal(dim1=-2, dim2=-1).add_(chunks.whole[..., 0])
    return matrices


def _states(chunks: _Chunks, left_key: Tensor, matrices: Tensor) -> Tensor:
    """What each chunk begins with, and behind the last one [D, Hv, n + 1, Dk, Dv]; rows begin with zeros."""
    states = F.pad(left_key.mT @ chunks.own, (0, 0, 0, 0, 1, 0))
    flat, matrices = states.flatten(0, 1), matrices.flatten(0, 1)
    for at in range(matrices.shape[1]):
        flat[:, at + 1].baddbmm_(matrices[:, at], flat[:, at])
    return states


def _back(given: Tensor, matrices: Tensor) -> Tensor:
    """Gradients of the states behind chunks; `given` [D, Hv, n, Dk, Dv] is what a chunk adds to that of its own."""
    behind = F.pad(given[:, :, 1:], (0, 0, 0, 0, 0, 1))
    flat, matrices = behind.flatten(0, 1), matrices.flatten(0, 1)
    for at in reversed(range(1, matrices.shape[1])):
        flat[:, at - 1].baddbmm_(matrices[:, at].mT, flat[:, at])
    return behind


def delta_rule(rows: Rows) -> tuple[Tensor, Tensor]:
    """out [D, L, Hv, Dv] in the value's dtype, and the states behind the rows [D, Hv, Dk, Dv] in fp32 (fp64)."""
    chunks = _chunks(rows)
    left_key = chunks.key * chunks.left
    states = _states(chunks, left_key, _transitions(chunks, left_key))
    state = states[:, :, :-1]
    out = (chunks.query * chunks.grown) @ state + chunks.seen @ (chunks.own - chunks.of_state @ state)
    return _by_token(out, rows.value.shape[1]).to(rows.value.dtype), states[:, :, -1]


def delta_rule_backward(grad: Tensor, rows: Rows) -> Rows:
    """Gradients of `delta_rule`'s out, of which `grad` is given [D, L, Hv, Dv], each in its own dtype."""
    chunks, length = _chunks(rows), rows.value.shape[1]
    left_key, grown_query = chunks.key * chunks.left, chunks.query * chunks.grown
    matrices = _transitions(chunks, left_key)
    state = _states(chunks, left_key, matrices)[:, :, :-1]
    grad = _by_chunk(grad.to(state.dtype), chunks.value.shape[2] * CHUNK)
    change, direct = chunks.own - chunks.of_state @ state, chunks.seen.mT @ grad
    after = _back(grown_query.mT @ grad - chunks.of_state.mT @ direct, matrices)
    del matrices
    d_change = direct.add_(left_key @ after)
    d_value, d_of_key = chunks.inverse.mT @ d_change, chunks.inverse.mT @ (d_change @ state.mT).neg_()
    d_grown_query, d_left_key, of_seen = grad @ state.mT, change @ after.mT, grad @ change.mT
    of_whole = (chunks.whole * after * state).sum((-1, -2))
    del state, after, change, d_change, grad
    d_mixing = (d_value @ chunks.own.mT + d_of_key @ chunks.of_state.mT).neg_().tril_(-1)
    faded = d_mixing * chunks.mixing + of_seen * chunks.seen
    d_beta = (d_value * chunks.value).sum(-1) + (d_of_key * chunks.grown * chunks.key).sum(-1)
    d_mixing *= chunks.fade
    d_beta += (d_mixing * (chunks.key @ chunks.key.mT)).sum(-1)
    d_products, d_seen = d_mixing * chunks.beta, of_seen * chunks.fade
    of_key = d_of_key * (chunks.beta * chunks.grown)
    d_query = d_seen @ chunks.key + chunks.grown * d_grown_query
    d_key = of_key + (d_products + d_products.mT) @ chunks.key + d_seen.mT @ chunks.query + chunks.left * d_left_key
    kept = (d_left_key * left_key).sum(-1)
    d_sums = faded.sum(-1) - faded.sum(-2) - kept
    d_sums += (of_key * chunks.key).sum(-1) + (d_grown_query * grown_query).sum(-1)
    d_sums[..., -1] += kept.sum(-1) + of_whole
    d_decay = d_sums.flip(-1).cumsum(-1).flip(-1)
    d_query *= chunks.query.shape[-1] ** -0.5
    return Rows(
        _of_heads(d_query, rows.query), _of_heads(d_key, rows.key),
        _by_token(d_value * chunks.beta, length).to(rows.value.dtype),
        _by_token(d_decay, length).to(rows.decay.dtype), _by_token(d_beta, length).to(rows.beta.dtype),
    )  # fmt: skip


def _of_heads(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of q or k [D, L, Hk, Dk] from that of what is of length one, by value head and chunk."""
    heads = x.shape[2]
    grad = _by_token(grad.unflatten(1, (heads, -1)).sum(2), x.shape[1])
    y, rstd = unit(x.to(grad.dtype))
    return (rstd * (grad - y * (grad * y).sum(-1, keepdim=True))).to(x.dtype)
