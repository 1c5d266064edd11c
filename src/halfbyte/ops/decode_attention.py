"""Attention of one new token per sequence over a static key-value cache: the specification.

The cache has more slots than tokens. Sequence b uses slots [firstᵦ, last], where firstᵦ is the first slot after the
prompt's left padding. `last` is a tensor, so a captured CUDA graph reads its current value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op


def store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new [B, H, T, D] to slots [T] of a cache [B, H, S, D]; float8_e4m3fn clamps values to ±448."""
    if cache.dtype is torch.float8_e4m3fn:  # indexed as bytes: torch does not index FP8 on any device
        limit = torch.finfo(cache.dtype).max
        cache, new = cache.view(torch.uint8), new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
    cache.index_copy_(2, slots, new)


@op("triton.cached_attention")
def store_both_(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """`store` one token's keys and values [B, H, 1, D] in their caches."""
    store(keys, slots, k)
    store(values, slots, v)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of scores [..., H, T, S], with optional learned sinks [H]."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


@op("triton.cached_attention")
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
        last: int64 [1], the newest token's slot.
        scale: factor of q·k.
        window: slots that a token attends to, its own included; None: all.
        softcap: scores s become softcap · tanh(s / softcap); None: no cap.
        sinks: [Hq] learned sinks, an extra score per head whose value is 0; None: no sinks.

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
