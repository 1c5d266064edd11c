"""Causal attention in torch's operations, a tile of queries at a time, never with all scores at once.

For scores that are capped (Gemma 2) or have sinks (gpt-oss), where no kernel takes them: on CPUs, in float32. Forward
keeps q, k, v, the result and the logarithm of each softmax's sum; backward makes each tile's scores again from them.
Keys that no query of a tile sees are left out, so whole rows cost half of what all T×T scores do, and windows less.

The mathematics is `ops.attention`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import Scores, sinks_gradient
from .function import OnceFunction

TILE_BYTES = 32 * 2**20  # of one tile's scores in fp32
CACHED_BYTES = 2**20  # the same on a CPU, in whose caches they stay
TENSORS = 6  # as large as them that are there at once
SMALLEST_TILE = 16  # queries
SMALLEST_WINDOW = 128  # tiles have no more queries than the window, or this: each sees all keys that one of them sees


def tiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
    sinks: Tensor | None = None,
    begins: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Causal attention.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hk, T, D], Hk dividing Hq; of query's dtype.
        sinks: [Hq], a score of each head that every token gives beside its keys'; None: there are none.
        begins: int64 [B, T], where in its row each token's document begins; None: a row is one document.
        longest: at least the tokens of the longest document; None: of a row.

    Returns:
        [B, Hq, T, D].
    """
    length = query.shape[2]
    reach = min(scores.window or length, longest or length, length)
    return _TiledAttention.apply(query, key, value, sinks, scores, reach, begins)


def tile_bytes(device: torch.device) -> int:
    """Of one tile's scores in fp32, at most, but where `SMALLEST_TILE` queries have more."""
    return CACHED_BYTES if device.type == "cpu" else TILE_BYTES


def tile_of(rows: int, heads: int, length: int, reach: int, room: int) -> int:
    """Queries of a tile whose scores may take `room` bytes."""
    keys = min(reach, length)
    fitting = room // (4 * rows * heads * keys) // SMALLEST_TILE * SMALLEST_TILE
    return min(length, max(SMALLEST_TILE, min(fitting, max(SMALLEST_WINDOW, reach))))


class _TiledAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, sinks, scores, reach, begins):
        rows, heads, length, width = query.shape
        out = query.new_empty(rows, length, heads, width).transpose(1, 2)  # as the next product saves it, too
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        sink = None if sinks is None else sinks.float().view(1, key.shape[1], -1, 1, 1)
        for tile in _tiles(query, reach):
            found, hidden = _scored(query, key, tile, scores, reach, begins)
            if scores.softcap is not None:
                found.mul_(scores.softcap)
            found.masked_fill_(hidden, -torch.inf)
            total = found.logsumexp(-1, keepdim=True)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            weights = found.sub_(total).exp_().to(value.dtype)
            _of(out, tile).copy_(_ungrouped(weights.flatten(2, 3) @ value[:, :, tile.keys], heads))
            sums[:, :, tile.queries] = total.squeeze(-1).flatten(1, 2)
        ctx.how = scores, reach, begins
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, sums = ctx.saved_tensors
        scores, reach, begins = ctx.how
        groups, asked = key.shape[1], ctx.needs_input_grad[3]
        dq = torch.empty_like(query, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        deltas = torch.empty_like(sums) if asked else None
        for tile in _tiles(query, reach):
            q, dout = (_grouped(_of(x, tile), groups) for x in (query, grad))
            found, hidden = _scored(query, key, tile, scores, reach, begins)
            total = _grouped(_of(sums, tile).unsqueeze(-1), groups)
            capped = found if scores.softcap is None else found * scores.softcap
            weights = capped.sub(total).exp_().masked_fill_(hidden, 0)
            del capped
            flat = dout.flatten(2, 3)
            dv[:, :, tile.keys] += weights.to(grad.dtype).flatten(2, 3).transpose(-1, -2) @ flat
            delta = (dout.float() * _grouped(_of(out, tile), groups)).sum(-1, keepdim=True)
            if deltas is not None:
                deltas[:, :, tile.queries] = delta.squeeze(-1).flatten(1, 2)
            change = (flat @ value[:, :, tile.keys].transpose(-1, -2)).view(weights.shape).float().sub_(delta)
            change.mul_(weights).mul_(scores.scale)
            if scores.softcap is not None:
                change.mul_(found.square_().neg_().add_(1))
            change = change.to(query.dtype).flatten(2, 3)
            _of(dq, tile).copy_(_ungrouped(change @ key[:, :, tile.keys], query.shape[1]))
            dk[:, :, tile.keys] += change.transpose(-1, -2) @ q.flatten(2, 3)
        dsinks = None
        if deltas is not None:
            of_heads = (x.transpose(0, 1).flatten(1) for x in (sums, deltas))
            dsinks = sinks_gradient(sinks, *of_heads).to(sinks.dtype)
        return dq, dk.to(key.dtype), dv.to(value.dtype), dsinks, None, None, None


@dataclass(frozen=True)
class _Tile:
    queries: slice
    keys: slice


def _tiles(query: Tensor, reach: int) -> list[_Tile]:
    rows, heads, length, _ = query.shape
    size = tile_of(rows, heads, length, reach, tile_bytes(query.device))
    begins = range(0, length, size)
    ends = [min(begin + size, length) for begin in begins]
    return [_Tile(slice(a, b), slice(max(a - reach + 1, 0), b)) for a, b in zip(begins, ends, strict=True)]


def _of(x: Tensor, tile: _Tile) -> Tensor:
    return x[:, :, tile.queries]


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, Hq, t, ...] → [B, Hk, Hq/Hk, t, ...]: the query heads of each key head."""
    return x.unflatten(1, (groups, -1))


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """[B, Hk, Hq/Hk · t, D] → [B, Hq, t, D]."""
    rows, groups, _, width = x.shape
    return x.reshape(rows, heads, -1, width) if heads != groups else x


def _scored(
    query: Tensor, key: Tensor, tile: _Tile, scores: Scores, reach: int, begins: Tensor | None
) -> tuple[Tensor, Any]:
    """Scores [B, Hk, Hq/Hk, t, keys] of a tile in fp32, of those that are capped their tanh alone, and which of them
    are not looked at."""
    q = _grouped(_of(query, tile), key.shape[1])
    products = q.flatten(2, 3) @ key[:, :, tile.keys].transpose(-1, -2)
    found = products.float().mul_(scores.scale / (scores.softcap or 1.0)).view(*q.shape[:-1], -1)
    if scores.softcap is not None:
        found.tanh_()
    at = torch.arange(tile.queries.start, tile.queries.stop, device=query.device).unsqueeze(-1)
    keys = torch.arange(tile.keys.start, tile.keys.stop, device=query.device)
    hidden = (keys > at) | (keys <= at - reach)
    if begins is not None:
        hidden = hidden | (keys < begins[:, tile.queries, None])
        hidden = hidden[:, None, None]
    return found, hidden
