"""Attention of one new token per sequence over keys and values in pages: the specification.

A page holds the keys and values of `PAGE` tokens (Kwon et al. 2023, arXiv:2309.06180, section 4.1). A sequence's table
lists its pages in order; sequences with a common prefix list the same pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from .decode import softmax
from .rope import rope_

PAGE = 64  # tokens per page
BUNDLE = 16  # most sequences per bundle


class Shared(NamedTuple):
    """Pages of a prefix that several sequences share, so that a kernel can read them once. Results do not change.

    Attributes:
        bundles: int32 [S, 3]: first sequence, number of consecutive sequences, and number of shared pages of each
            bundle; 0 sequences mark an unused entry.
        pages: int32 [R], shared pages of each sequence's bundle, or 0. At least one of its tokens is after them.
    """

    bundles: Tensor
    pages: Tensor


@op("triton.cached_attention")
def store_paged(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write new keys and values into a cache, in place.

    Args:
        keys, values: [P, H, S, D], pages of S slots; float8_e4m3fn saturates as in `decode.store`.
        pages, slots: int64 [N], the destination of each token.
        k, v: [N, H, D], in the cache's dtype if that has 16 bits or more.
    """
    for cache, new in ((keys, k), (values, v)):
        if cache.dtype is torch.float8_e4m3fn:  # indexed as bytes: torch does not index FP8 on any device
            limit = torch.finfo(cache.dtype).max
            cache, new = cache.view(torch.uint8), new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
        cache[pages, :, slots] = new.to(cache.dtype)


@op("triton.rope")
def rope_store_paged_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    slots: Tensor,
) -> None:
    """Apply `rope_` to q and k, and write k and v into a cache.

    Args:
        q: [B, Hq, T, D]; fp32, fp16 or bf16.
        k, v: [B, H, T, D] in q's dtype.
        cos, sin: as in `rope_`.
        keys, values, pages, slots: as in `store_paged`, of B · T tokens.
    """
    rope_(q, k, cos, sin, False)
    store_paged(keys, values, pages, slots, *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (k, v)))


@op("triton.cached_attention", "native.paged_attention")
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale · q·Kᵀ))·V over each sequence's tokens.

    Args:
        q: [R, Hq, D]; fp32, fp16 or bf16.
        keys, values: [P, Hk, PAGE, D] in q's dtype or float8_e4m3fn, Hk dividing Hq.
        tables: int32 [R, M], the pages of each sequence in order; entries after its last page are not read.
        lengths: int32 [R], tokens of each sequence, 1 to M · PAGE; the newest is q's.
        scale: factor of q·k.
        window: tokens that a token attends to, its own included; None: all.
        softcap: scores s become softcap · tanh(s / softcap); None: no cap.
        shared: shared prefixes; None: each sequence reads its own pages.
        sinks: as in `decode_attention`.

    Returns:
        [R, Hq, D] in q's dtype.
    """
    rows, heads, size = q.shape
    keys, values = (
        cache[tables.long()].to(q.dtype).transpose(1, 2).reshape(rows, -1, tables.shape[1] * PAGE, size)
        for cache in (keys, values)
    )
    slot, last = torch.arange(keys.shape[2], device=q.device), lengths.unsqueeze(1) - 1
    seen = slot <= last
    if window is not None:
        seen &= slot > last - window
    grouped = q.view(rows, keys.shape[1], -1, size)
    scores = (grouped @ keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(~seen.view(rows, 1, 1, -1), -torch.inf)
    weights = softmax(scores.view(rows, heads, 1, -1), sinks).view_as(scores)
    values = values.masked_fill(~seen.view(rows, 1, -1, 1), 0)  # uninitialized slots may be NaN
    return (weights.to(q.dtype) @ values).view(rows, heads, size)
