"""Attention scores in memory: what a fused layer's attention takes where it builds T × T numbers, or tiles of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..memory.batches import Shape

if TYPE_CHECKING:
    import torch


class Attention(Protocol):
    """What computes attention, as `models.attention.implementation` says: whether it builds the scores of all heads, a
    mask of each row, or the scores of a few queries at a time."""

    @property
    def scores(self) -> bool: ...

    @property
    def mask(self) -> bool: ...

    @property
    def tiles(self) -> bool: ...


Chooser = Callable[..., Attention]  # (text config, device, dtype, packed=) → what will compute


@dataclass(frozen=True)
class ScoreBytes:
    """Of one layer: what backward reads, and what else is there at the highest moment of its forward or backward."""

    kept: int = 0
    scratch: int = 0


NO_SCORES = ScoreBytes()


def score_bytes(text_config: Any, attention: Attention, batch: Shape, dtype: torch.dtype) -> ScoreBytes:
    """What the scores of a layer take.

    Args:
        text_config: the model's, with its number of heads.
        attention: what computes them.
        batch: a micro-batch.
        dtype: of q, k and v.
    """
    from ..autograd.capped_attention import TENSORS, TILE_BYTES

    if attention.tiles:
        return ScoreBytes(scratch=TENSORS * TILE_BYTES)
    square = batch.tokens * batch.length
    if attention.scores:  # products; tanh, where they are capped; the softmax in fp32, and again in `dtype`
        capped = bool(getattr(text_config, "attn_logit_softcapping", None))
        scores = square * text_config.num_attention_heads
        return ScoreBytes(scores * ((1 + capped) * dtype.itemsize + 4), scores * (dtype.itemsize + 4))
    return ScoreBytes(square * dtype.itemsize, square * dtype.itemsize) if attention.mask else NO_SCORES
