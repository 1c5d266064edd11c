"""Attention of one new token a row over a static key-value cache: the specification.

The cache has room for more tokens than it holds: slots [firstᵦ, last] of row b count, firstᵦ being where a prompt that
was padded on the left begins. `last` is a tensor, so that a captured CUDA graph follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op


def store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """new [B, H, T, D] into slots [T] of a cache [B, H, S, D]; values beyond ±448 are clamped for float8_e4m3fn."""
    if cache.dtype is torch.float8_e4m3fn:  # copied as bytes: no device indexes it
        limit = torch.finfo(cache.dtype).max
        cache, new = cache.view(torch.uint8), new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
    cache.index_copy_(2, slots, new)


@op("triton.decode_attention")
def store_both_(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """`store` of a token's keys and values [B, H, 1, D], one slot, in their caches."""
    store(keys, slots, k)
    store(values, slots, v)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the last dimension of scores [..., H, T, S]; with sinks [H], beside one more score of each head."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


@op("triton.decode_attention")
def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale · q·Kᵀ))·V over the slots in use.

    Args:
        q: [B, Hq, 1, D]; fp32, fp16 or bf16.
        keys, values: [B, Hk, S, D] in q's dtype or float8_e4m3fn, Hk dividing Hq.
        first: int32 [B].
        last: int64 [1]; the newest token's slot.
        scale: of the scores.
        window: slots that a token sees, its own among them; None for all.
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
        sinks: [Hq] float: a score of each head beside those of its keys, whose value is 0; None: there is none.

    Returns:
        [B, Hq, 1, D] in q's dtype.
    """
    batch, heads, _, size = q.shape
    slot = torch.arange(keys.shape[2], device=q.device)
    seen = (slot >= first.unsqueeze(1)) & (slot <= last)
    if window is not None:
        seen &= slot > last - window
    grouped = q.view(batch, keys.shape[1], -1, size)
    scores = (grouped @ keys.to(q.dtype).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(~seen.view(batch, 1, 1, -1), -torch.inf)
    weights = softmax(scores.view(batch, heads, 1, -1), sinks).view_as(scores)
    return (weights.to(q.dtype) @ values.to(q.dtype)).view(batch, heads, 1, size)
