"""Attention of one new token a row over keys and values in pages: the specification.

Pages hold the keys and values of `PAGE` tokens each (Kwon et al. 2023, arXiv:2309.06180, section 4.1), in no order of
their own: a row's table names its pages, and rows with a common beginning name the same ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from .decode_attention import softmax
from .rope import rope_

PAGE = 64  # tokens of a page
BUNDLE = 16  # rows of a bundle at most


class Shared(NamedTuple):
    """Pages that several rows begin with, so that a kernel may read them once for all of these; no result changes.

    Attributes:
        bundles: int32 [S, 3]: of each bundle its first row, its number of rows, which follow one another, and the
            number of pages that all of them begin with; 0 rows: none.
        pages: int32 [R]: pages that a row's bundle begins with; 0: it is in none. Behind them is a token of the row's.
    """

    bundles: Tensor
    pages: Tensor


@op("triton.paged_attention")
def store_paged(keys: Tensor, values: Tensor, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """New keys and values into a cache, in place.

    Args:
        keys, values: [P, H, PAGE, D]; float8_e4m3fn as `decode_attention.store`.
        pages, slots: int64 [N]: where each goes.
        k, v: [N, H, D], in the cache's dtype where that has 16 bits or more.
    """
    for cache, new in ((keys, k), (values, v)):
        if cache.dtype is torch.float8_e4m3fn:  # copied as bytes: no device indexes it
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
    """`rope_` of q and k, and k and v into a cache.

    Args:
        q: [B, Hq, T, D]; fp32, fp16 or bf16.
        k, v: [B, H, T, D] in q's dtype.
        cos, sin: as in `rope_`.
        keys, values, pages, slots: as in `store_paged`, of B · T tokens.
    """
    rope_(q, k, cos, sin, False)
    store_paged(keys, values, pages, slots, *(each.transpose(1, 2).flatten(0, 1) for each in (k, v)))


@op("triton.paged_attention", "native.paged_attention")
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
    """softmax(cap(scale · q·Kᵀ))·V over a row's tokens.

    Args:
        q: [R, Hq, D]; fp32, fp16 or bf16.
        keys, values: [P, Hk, PAGE, D] in q's dtype or float8_e4m3fn, Hk dividing Hq.
        tables: int32 [R, M]: a row's pages in order; what lies behind its last is not read.
        lengths: int32 [R]: tokens of a row, one or more, at most M · PAGE; the newest is q's.
        scale: of the scores.
        window: tokens that a token sees, its own among them; None for all.
        softcap: scores s become softcap · tanh(s / softcap); None leaves them.
        shared: pages that rows have in common; None: each row reads its own.
        sinks: as in `decode_attention`.

    Returns:
        [R, Hq, D] in q's dtype.
    """
    rows, heads, size = q.shape
    keys, values = (
        each[tables.long()].to(q.dtype).transpose(1, 2).reshape(rows, -1, tables.shape[1] * PAGE, size)
        for each in (keys, values)
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
    values = values.masked_fill(~seen.view(rows, 1, -1, 1), 0)  # what nobody wrote may be NaN
    return (weights.to(q.dtype) @ values).view(rows, heads, size)
