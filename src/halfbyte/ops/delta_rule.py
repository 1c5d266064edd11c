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

Where a document begins inside a row S is 0: there G starts anew, and whatever would reach over the place is an exact 0.

Backward makes all of this again: q, k, v, g and β are what a layer keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens
LEAST = 8  # rows of the blocks that are inverted as sums of powers, which cost no more than one digit there
# Tokens times value heads that are computed at once: each takes up to 18 KB for a while, with heads of 128.
AT_ONCE = 1 << 17
EPSILON = 1e-6  # beside the squares that q and k are divided by the root of


class Rows(NamedTuple):
    """What the rule reads; Hk divides Hv, and a key head serves value heads that stand side by side.

    Attributes:
        query, key: [D, L, Hk, Dk], of any length; q is divided by √Dk.
        value: [D, L, Hv, Dv].
        decay, beta: g ≤ 0 and β, [D, L, Hv]; both 0 for a token that is not there.
        first: bool [D, L], of tokens that a document begins with; None: each row is one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    first: Tensor | None = None


def parts_of(rows: Rows) -> list[Rows]:
    """Some heads each, so that they take no more than they may at once."""
    count, heads = rows.value.shape[:3].numel(), rows.key.shape[2]
    parts = min(-(-count // AT_ONCE), heads)
    tensors = rows.query, rows.key, rows.value, rows.decay, rows.beta
    split = zip(*(x.tensor_split(parts, 2) for x in tensors), strict=True)
    return [Rows(*part)._replace(first=rows.first) for part in split]


class _Chunks(NamedTuple):
    """Of all n chunks; [n, D, H, g, C, ·] with H key heads, each of which serves g value heads, where nothing is said.

    Attributes:
        query, key: of length one, q over √Dk, [n, D, H, 1, C, Dk].
        value: [.., Dv].
        beta, grown, left: β, e^G and e^(G_C − G) [.., 1].
        fade: e^(G_i − G_j) [.., C, C], 0 above the diagonal.
        alike: k_i·k_j [n, D, H, 1, C, C].
        mixing, inverse, seen: A, T and P [.., C, C].
        own, of_state: U and W.
        left_key: e^(G_C − G)·K.
        unseen: bool, of [.., C, C]: what a token does not see.
        places: of documents; None: rows are documents.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    grown: Tensor
    left: Tensor
    fade: Tensor
    alike: Tensor
    mixing: Tensor
    inverse: Tensor
    seen: Tensor
    own: Tensor
    of_state: Tensor
    left_key: Tensor
    unseen: Tensor
    places: _Places | None

    @property
    def whole(self) -> Tensor:
        """e^(G_C) [n, D, H, g, 1, 1]."""
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


def _by_chunk(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[n, D, H, g, C, ·] of [D, L, H·g, ·], filled up with zeros."""
    short = -x.shape[1] % CHUNK
    x = F.pad(x, (0, 0, 0, 0, 0, short)) if short else x
    view = x.unflatten(1, (-1, CHUNK)).unflatten(3, (heads, -1)).permute(1, 0, 3, 4, 2, 5)
    return torch.empty(view.shape, dtype=dtype, device=x.device).copy_(view)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """[D, L, H·g, ·] of [n, D, H, g, C, ·], in the shape and dtype of `like`."""
    view = x.permute(1, 0, 4, 2, 3, 5)
    out = torch.empty(view.shape, dtype=like.dtype, device=x.device).copy_(view)
    return out.flatten(3, 4).flatten(1, 2)[:, : like.shape[1]].view(like.shape)


def _product(a: Tensor, b: Tensor, plus: Tensor | None = None, sign: int = 1) -> Tensor:
    """plus ± a·b of matrices [.., ·, ·]; `plus`, where it is given, becomes that."""
    if plus is None:
        return a @ b if sign > 0 else (a @ b).neg_()
    plus.view(-1, *plus.shape[-2:]).baddbmm_(a.flatten(0, -3), b.flatten(0, -3), alpha=sign)
    return plus


class _Places(NamedTuple):
    """Where documents are in chunks.

    Attributes:
        begun: bool [n, D, C]: a token's document began in its chunk.
        apart: bool [n, D, C, C]: two tokens are not of one document.
    """

    begun: Tensor
    apart: Tensor

    @classmethod
    def of(cls, first: Tensor) -> _Places:
        first = F.pad(first, (0, -first.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK)).transpose(0, 1)
        number = first.cumsum(-1)
        return cls(number > 0, number.unsqueeze(-1) != number.unsqueeze(-2))


def _sums(x: Tensor, unseen: Tensor, dim: int, places: _Places | None) -> Tensor:
    """Of x [.., 1, C] over what each token sees (dim −1), or of x [.., C, 1] over what sees it (dim −2): [.., C].

    Beside other documents exact zeros are added, not sums taken off that those are part of: bits would follow these.
    """
    if places is not None:
        return x.expand(*x.shape[:-2], CHUNK, CHUNK).masked_fill(unseen, 0).sum(dim)
    return x.squeeze(-2).cumsum(-1) if dim == -1 else x.squeeze(-1).flip(-1).cumsum(-1).flip(-1)


def _wide(x: Tensor) -> Tensor:
    """x [n, D, ...] beside what has heads, too: [n, D, H, g, ...]."""
    return x.unflatten(1, (-1, 1, 1))


def _chunks(rows: Rows) -> _Chunks:
    exact, heads = torch.promote_types(rows.value.dtype, torch.float32), rows.key.shape[2]
    query, key, value = (_by_chunk(x, heads, exact) for x in (rows.query, rows.key, rows.value))
    query, key = unit(query)[0].mul_(query.shape[-1] ** -0.5), unit(key)[0]
    decay, beta = (_by_chunk(x.unsqueeze(-1), heads, exact) for x in (rows.decay, rows.beta))
    places = None if rows.first is None else _Places.of(rows.first)
    unseen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    unseen = unseen if places is None else _wide(unseen | places.apart)
    sums = _sums(decay.mT, unseen, -1, places)
    fade = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(unseen, -torch.inf).exp_()
    grown, left = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    if places is not None:
        grown = grown.masked_fill_(_wide(places.begun).unsqueeze(-1), 0)
        left = left.masked_fill_(_wide(places.apart[..., -1]).unsqueeze(-1), 0)
    alike = key @ key.mT
    mixing = (fade * alike).mul_(beta).tril_(-1)
    inverted = inverse(mixing)
    own = (inverted * beta.mT) @ value
    of_state = ((inverted * (beta * grown).mT).flatten(3, 4) @ key.squeeze(3)).unflatten(3, beta.shape[3:5])
    seen, left_key = fade * (query @ key.mT), key * left
    within = query, key, value, beta, grown, left, fade, alike, mixing, inverted, seen
    return _Chunks(*within, own, of_state, left_key, unseen, places)


def _transitions(chunks: _Chunks) -> Tensor:
    """M [.., Dk, Dk]."""
    matrices = _product(chunks.left_key.mT, chunks.of_state, sign=-1)
    matrices.diagonal(dim1=-2, dim2=-1).add_(chunks.whole[..., 0])
    return matrices


def _states(chunks: _Chunks, matrices: Tensor) -> Tensor:
    """What each chunk begins with, and behind the last one [n + 1, D, H, g, Dk, Dv]; rows begin with zeros."""
    states = chunks.own.new_empty(len(matrices) + 1, *matrices.shape[1:-1], chunks.own.shape[-1])
    states[0] = 0
    torch.matmul(chunks.left_key.mT, chunks.own, out=states[1:])
    for at, matrix in enumerate(matrices):
        _product(matrix, states[at], states[at + 1])
    return states


def _back(given: Tensor, matrices: Tensor) -> Tensor:
    """Gradients of the states behind chunks; `given` [.., Dk, Dv] is what a chunk adds to that of its own."""
    behind = torch.cat([given[1:], torch.zeros_like(given[:1])])
    for at in reversed(range(1, len(matrices))):
        _product(matrices[at].mT, behind[at], behind[at - 1])
    return behind


def delta_rule(rows: Rows) -> tuple[Tensor, Tensor]:
    """out [D, L, Hv, Dv] in the value's dtype, and the states behind the rows [D, Hv, Dk, Dv] in fp32 (fp64)."""
    chunks = _chunks(rows)
    states = _states(chunks, _transitions(chunks))
    state = states[:-1]
    change = _product(chunks.of_state, state, chunks.own, -1)
    out = _product(chunks.query * chunks.grown, state, chunks.seen @ change)
    return _by_token(out, rows.value), states[-1].flatten(1, 2)


def delta_rule_backward(grad: Tensor, rows: Rows) -> Rows:
    """Gradients of `delta_rule`'s out, of which `grad` is given [D, L, Hv, Dv], each in its own dtype."""
    chunks = _chunks(rows)
    matrices, grown_query = _transitions(chunks), chunks.query * chunks.grown
    state = _states(chunks, matrices)[:-1]
    grad = _by_chunk(grad, rows.key.shape[2], state.dtype)
    change, direct = _product(chunks.of_state, state, chunks.own.clone(), -1), chunks.seen.mT @ grad
    after = _back(_product(chunks.of_state.mT, direct, grown_query.mT @ grad, -1), matrices)
    del matrices
    d_change = _product(chunks.left_key, after, direct)
    d_value, d_of_key = chunks.inverse.mT @ d_change, chunks.inverse.mT @ _product(d_change, state.mT, sign=-1)
    d_grown_query, d_left_key, of_seen = grad @ state.mT, change @ after.mT, grad @ change.mT
    of_whole = (chunks.whole * after).mul_(state).sum((-1, -2))
    del state, after, change, d_change, direct, grad
    d_mixing = _product(d_value, chunks.own.mT, _product(d_of_key, chunks.of_state.mT, sign=-1), -1).tril_(-1)
    faded = (d_mixing * chunks.mixing).addcmul_(of_seen, chunks.seen)
    d_seen = of_seen.mul_(chunks.fade).sum(3, keepdim=True)
    d_mixing *= chunks.fade
    d_beta = (d_mixing * chunks.alike).sum(-1) + (d_value * chunks.value).sum(-1)
    d_products = d_mixing.mul_(chunks.beta).sum(3, keepdim=True)
    d_of_key *= chunks.grown
    d_beta += (d_of_key * chunks.key).sum(-1)
    d_of_key *= chunks.beta
    kept = (d_left_key * chunks.left_key).sum(-1)
    d_sums = faded.sum(-1) - faded.sum(-2) - kept
    d_sums += (d_of_key * chunks.key).sum(-1) + (d_grown_query * grown_query).sum(-1)
    d_sums[..., -1] += kept.sum(-1) + of_whole
    d_query = d_seen @ chunks.key + (chunks.grown * d_grown_query).sum(3, keepdim=True)
    d_key = (d_products + d_products.mT) @ chunks.key + d_seen.mT @ chunks.query
    d_key += d_of_key.addcmul_(chunks.left, d_left_key).sum(3, keepdim=True)
    d_query *= chunks.query.shape[-1] ** -0.5
    d_decay = _sums(d_sums.unsqueeze(-1), chunks.unseen, -2, chunks.places)
    d_decay = _by_token(d_decay.unsqueeze(-1), rows.decay.unsqueeze(-1)).squeeze(-1)
    d_beta = _by_token(d_beta.unsqueeze(-1), rows.beta.unsqueeze(-1)).squeeze(-1)
    d_value *= chunks.beta
    return Rows(
        _of_unit(d_query, rows.query), _of_unit(d_key, rows.key), _by_token(d_value, rows.value), d_decay, d_beta
    )


def _of_unit(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of q or k [D, L, Hk, Dk] from that of what is of length one, by chunk."""
    exact = _by_chunk(x, x.shape[2], grad.dtype)
    y, rstd = unit(exact)
    return _by_token((grad - y * (grad * y).sum(-1, keepdim=True)).mul_(rstd), x)
