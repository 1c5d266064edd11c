"""Causal attention whose scores are capped (Gemma 2), without all scores at once: a tile of queries at a time.

Scores become softcap · tanh(score / softcap) before the softmax. Forward keeps q, k, v, the result and the logarithm of
each softmax's sum; backward makes each tile's scores again from them. Keys that no query of a tile sees are left out,
so whole rows cost half of what all T×T scores do, and windows less.

Source: the backward from sums of softmax is FlashAttention's (Dao et al. 2022, arXiv:2205.14135, algorithm 4); capped
scores are those of Gemma 2 (arXiv:2408.00118, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_BYTES = 32 * 2**20  # of one tile's scores in fp32
TENSORS = 6  # as large as them that are there at once
SMALLEST_TILE = 16  # queries


@dataclass(frozen=True)
class Scores:
    """How scores are made of q·k.

    Args:
        scale: they are multiplied by.
        softcap: they stay within ±softcap.
        reach: keys that a query may see, itself among them: of its window and of the longest document.
    """

    scale: float
    softcap: float
    reach: int


def capped_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores, begins: Tensor | None = None) -> Tensor:
    """softmax(cap(q·kᵀ)) · v, causal.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hk, T, D], Hk dividing Hq; of query's dtype.
        begins: int64 [B, T], where in its row each token's document begins; None: a row is one document.

    Returns:
        [B, Hq, T, D].
    """
    return _CappedAttention.apply(query, key, value, scores, begins)


def tile_of(rows: int, heads: int, length: int, reach: int) -> int:
    """Queries of a tile."""
    keys = min(reach, length)
    return min(length, max(SMALLEST_TILE, TILE_BYTES // (4 * rows * heads * keys) // SMALLEST_TILE * SMALLEST_TILE))


class _CappedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, scores, begins):
        groups = key.shape[1]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        for tile in _tiles(query, scores):
            capped, hidden = _capped(query, key, tile, scores, begins)
            capped.mul_(scores.softcap).masked_fill_(hidden, -torch.inf)
            total = capped.logsumexp(-1, keepdim=True)
            weights = capped.sub_(total).exp_().to(value.dtype)
            _of(out, tile).copy_(_ungrouped(weights.flatten(2, 3) @ value[:, :, tile.keys], query.shape[1]))
            sums[:, :, tile.queries] = total.squeeze(-1).flatten(1, 2)
        ctx.scores, ctx.begins, ctx.groups = scores, begins, groups
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, out, sums = ctx.saved_tensors
        dq = torch.empty_like(query, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        for tile in _tiles(query, ctx.scores):
            q, dout = (_grouped(_of(x, tile), ctx.groups) for x in (query, grad))
            tanh, hidden = _capped(query, key, tile, ctx.scores, ctx.begins)
            total = _grouped(_of(sums, tile).unsqueeze(-1), ctx.groups)
            weights = (tanh * ctx.scores.softcap).sub_(total).exp_().masked_fill_(hidden, 0)
            flat = dout.flatten(2, 3)
            dv[:, :, tile.keys] += weights.to(grad.dtype).flatten(2, 3).transpose(-1, -2) @ flat
            delta = (dout.float() * _grouped(_of(out, tile), ctx.groups)).sum(-1, keepdim=True)
            change = (flat @ value[:, :, tile.keys].transpose(-1, -2)).view(weights.shape).float().sub_(delta)
            change.mul_(weights).mul_(tanh.square_().neg_().add_(1)).mul_(ctx.scores.scale)
            change = change.to(query.dtype).flatten(2, 3)
            _of(dq, tile).copy_(_ungrouped(change @ key[:, :, tile.keys], query.shape[1]))
            dk[:, :, tile.keys] += change.transpose(-1, -2) @ q.flatten(2, 3)
        return dq, dk.to(key.dtype), dv.to(value.dtype), None, None


@dataclass(frozen=True)
class _Tile:
    queries: slice
    keys: slice


def _tiles(query: Tensor, scores: Scores) -> list[_Tile]:
    rows, heads, length, _ = query.shape
    size = tile_of(rows, heads, length, scores.reach)
    begins = range(0, length, size)
    ends = [min(begin + size, length) for begin in begins]
    return [_Tile(slice(a, b), slice(max(a - scores.reach + 1, 0), b)) for a, b in zip(begins, ends, strict=True)]


def _of(x: Tensor, tile: _Tile) -> Tensor:
    return x[:, :, tile.queries]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, Hq, t, ...] → [B, Hk, Hq/Hk, t, ...]: the query heads of each key head."""
    return x.unflatten(1, (groups, -1))


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """[B, Hk, Hq/Hk · t, D] → [B, Hq, t, D]."""
    rows, groups, _, width = x.shape
    return x.reshape(rows, heads, -1, width) if heads != groups else x


def _capped(query: Tensor, key: Tensor, tile: _Tile, scores: Scores, begins: Tensor | None) -> tuple[Tensor, Any]:
    """tanh(score / softcap) [B, Hk, Hq/Hk, t, keys] of a tile in fp32, and which of them are not looked at."""
    q = _grouped(_of(query, tile), key.shape[1])
    products = q.flatten(2, 3) @ key[:, :, tile.keys].transpose(-1, -2)
    tanh = products.float().mul_(scores.scale / scores.softcap).tanh_().view(*q.shape[:-1], -1)
    at = torch.arange(tile.queries.start, tile.queries.stop, device=query.device).unsqueeze(-1)
    keys = torch.arange(tile.keys.start, tile.keys.stop, device=query.device)
    hidden = (keys > at) | (keys <= at - scores.reach)
    if begins is not None:
        hidden = hidden | (keys < begins[:, tile.queries, None])
        hidden = hidden[:, None, None]
    return tanh, hidden
