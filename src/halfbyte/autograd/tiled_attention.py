"""Causal attention in torch operations for one tile of queries at a time, without materializing all scores.

It supports softcaps (Gemma 2) and sinks (gpt-oss) where no kernel does: on CPUs and in float32. The forward saves q, k,
v, the output and each row's logsumexp; the backward recomputes each tile's scores. Keys that no query of a tile attends
to are skipped, so full rows cost half of all T×T scores, and windows less.

The formulas are those of `ops.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import Scores, sinks_gradient
from .function import OnceFunction

TILE_BYTES = 32 * 2**20  # fp32 scores of one tile
CACHED_BYTES = 2**20  # fp32 scores of one tile on a CPU, sized for its caches
TENSORS = 6  # number of tensors of a tile's size that exist at once
SMALLEST_TILE = 16  # queries
# Tiles have no more queries than the window, or than this: a tile reads the keys of all its queries' windows.
SMALLEST_WINDOW = 128


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
        scores: scale, window and softcap of the scores.
        sinks: [Hq], a learned score per head that is added to every softmax's denominator; or None.
        begins: int64 [B, T], position in the row where each token's document begins; None: a row is one document.
        longest: upper bound on the tokens of a document; None: the length of a row.

    Returns:
        [B, Hq, T, D].
    """
    length = query.shape[2]
    reach = min(scores.window or length, longest or length, length)
    return _TiledAttention.apply(query, key, value, sinks, scores, reach, begins)


def tile_bytes(device: torch.device) -> int:
    """Maximum bytes of one tile's fp32 scores; tiles of `SMALLEST_TILE` queries may exceed it."""
    return CACHED_BYTES if device.type == "cpu" else TILE_BYTES


def tile_of(rows: int, heads: int, length: int, reach: int, room: int) -> int:
    """Number of queries in a tile whose scores may take `room` bytes."""
    keys = min(reach, length)
    fitting = room // (4 * rows * heads * keys) // SMALLEST_TILE * SMALLEST_TILE
    return min(length, max(SMALLEST_TILE, min(fitting, max(SMALLEST_WINDOW, reach))))


class _TiledAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, sinks, scores, reach, begins):
        rows, heads, length, width = query.shape
        out = query.new_empty(rows, length, heads, width).transpose(1, 2)  # the layout that o_proj reads
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        sink = None if sinks is None else sinks.float().view(1, key.shape[1], -1, 1, 1)
        for tile in _tiles(query, reach):
            tile_scores, masked = _tile_scores(query, key, tile, scores, reach, begins)
            if scores.softcap is not None:
                tile_scores.mul_(scores.softcap)
            tile_scores.masked_fill_(masked, -torch.inf)
            total = tile_scores.logsumexp(-1, keepdim=True)
            if sink is not None:
                total = torch.logaddexp(total, sink)
            weights = tile_scores.sub_(total).exp_().to(value.dtype)
            _of(out, tile).copy_(_ungrouped(weights.flatten(2, 3) @ value[:, :, tile.keys], heads))
            sums[:, :, tile.queries] = total.squeeze(-1).flatten(1, 2)
        ctx.options = scores, reach, begins
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, sums = ctx.saved_tensors
        scores, reach, begins = ctx.options
        groups, need_sinks = key.shape[1], ctx.needs_input_grad[3]
        dq = torch.empty_like(query, memory_format=torch.contiguous_format)
        dk, dv = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        deltas = torch.empty_like(sums) if need_sinks else None
        for tile in _tiles(query, reach):
            q, dout = (_grouped(_of(x, tile), groups) for x in (query, grad))
            tile_scores, masked = _tile_scores(query, key, tile, scores, reach, begins)
            total = _grouped(_of(sums, tile).unsqueeze(-1), groups)
            capped = tile_scores if scores.softcap is None else tile_scores * scores.softcap
            weights = capped.sub(total).exp_().masked_fill_(masked, 0)
            del capped
            flat = dout.flatten(2, 3)
            dv[:, :, tile.keys] += weights.to(grad.dtype).flatten(2, 3).transpose(-1, -2) @ flat
            delta = (dout.float() * _grouped(_of(out, tile), groups)).sum(-1, keepdim=True)
            if deltas is not None:
                deltas[:, :, tile.queries] = delta.squeeze(-1).flatten(1, 2)
            change = (flat @ value[:, :, tile.keys].transpose(-1, -2)).view(weights.shape).float().sub_(delta)
            change.mul_(weights).mul_(scores.scale)
            if scores.softcap is not None:
                change.mul_(tile_scores.square_().neg_().add_(1))
            change = change.to(query.dtype).flatten(2, 3)
            _of(dq, tile).copy_(_ungrouped(change @ key[:, :, tile.keys], query.shape[1]))
            dk[:, :, tile.keys] += change.transpose(-1, -2) @ q.flatten(2, 3)
        dsinks = None
        if deltas is not None:
            by_head = (x.transpose(0, 1).flatten(1) for x in (sums, deltas))
            dsinks = sinks_gradient(sinks, *by_head).to(sinks.dtype)
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
    """[B, Hq, t, ...] → [B, Hk, Hq/Hk, t, ...]: group query heads by key head."""
    return x.unflatten(1, (groups, -1))


def _ungrouped(x: Tensor, heads: int) -> Tensor:
    """[B, Hk, Hq/Hk · t, D] → [B, Hq, t, D]."""
    rows, groups, _, width = x.shape
    return x.reshape(rows, heads, -1, width) if heads != groups else x


def _tile_scores(
    query: Tensor, key: Tensor, tile: _Tile, scores: Scores, reach: int, begins: Tensor | None
) -> tuple[Tensor, Any]:
    """fp32 scores [B, Hk, Hq/Hk, t, keys] of a tile (with a softcap: tanh(score / softcap)), and their mask."""
    q = _grouped(_of(query, tile), key.shape[1])
    products = q.flatten(2, 3) @ key[:, :, tile.keys].transpose(-1, -2)
    products_ = products.float().mul_(scores.scale / (scores.softcap or 1.0)).view(*q.shape[:-1], -1)
    if scores.softcap is not None:
        products_.tanh_()
    at = torch.arange(tile.queries.start, tile.queries.stop, device=query.device).unsqueeze(-1)
    keys = torch.arange(tile.keys.start, tile.keys.stop, device=query.device)
    masked = (keys > at) | (keys <= at - reach)
    if begins is not None:
        masked = masked | (keys < begins[:, tile.queries, None])
        masked = masked[:, None, None]
    return products_, masked
