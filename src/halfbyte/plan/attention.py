"""Attention on an accelerator, as a replay on shapes runs it: it allocates what the kernels there do.

Which kernels those are is `modeling.attention.implementation`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..autograd.attention import has_repeatable_rows
from ..autograd.tiled_attention import TENSORS
from ..modeling.attention import Implementation
from ..ops.attention import parts_of_rows

NAME = "halfbyte_planned"


@dataclass(frozen=True)
class AttentionBytes:
    """Of one layer, beyond q, k, v, the result and its logsumexp.

    Args:
        kept: for backward.
        scratch: at the highest moment of its forward, and of its backward.
        back: the same of its backward alone.
        sums: whether backward adds up dq in fp32, and dk and dv for each query head.
    """

    kept: int = 0
    scratch: int = 0
    back: int = 0
    sums: bool = True

    @classmethod
    def of(cls, found: Implementation, query: Tensor, key: Tensor, capped: bool) -> AttentionBytes:
        """Of `found`, with `query` [B, Hq, T, D] and `key` [B, Hk, T, D]."""
        rows, heads, length, _ = query.shape
        square, size = rows * length * length, query.element_size()
        if found.own:
            return cls(sums=False)
        if found.repeatable and has_repeatable_rows(query):
            at_once, keys = parts_of_rows(query, key) or (0, 0)
            return cls(back=2 * at_once * keys * (heads // key.shape[1]) * length**2, sums=False)
        if found.tiles:
            return cls(scratch=TENSORS * found.tiles)
        if found.scores:  # tanh, where scores are capped; the softmax in fp32, and again where query's dtype is another
            again = size if query.dtype != torch.float32 else 0
            copies = 2 * query.numel() * size if key.shape[1] < heads else 0  # keys and values of every query head
            return cls(square * heads * (capped * size + 4 + again) + copies, square * heads * (size + 4))
        return cls(square * size, square * size) if found.mask else cls()  # a Boolean mask as numbers to add


def stand_in(model: nn.Module, found: Implementation) -> None:
    """Have the text layers of `model` attend by `attend`, as `found` does."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation, config._halfbyte_planned = NAME, found


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, H, T, D], value [B, Hk, T, Dv] → [B, T, H, Dv]."""
    extra = AttentionBytes.of(module.config._halfbyte_planned, query, key, kwargs.get("softcap") is not None)
    return _Attention.apply(query, key, value, extra).transpose(1, 2), None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, extra):
        rows, heads, length, _ = query.shape
        out = query.new_empty(rows, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums, _bytes(extra.kept, query))
        ctx.scratch, ctx.sums = max(extra.scratch, extra.back), extra.sums
        _bytes(extra.scratch, query)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, sums, _ = ctx.saved_tensors
        scratch = [torch.empty_like(sums), _bytes(ctx.scratch, query)]  # δ, or dout · out of each head
        if ctx.sums:
            scratch.append(torch.empty_like(query, dtype=torch.float32))
        if ctx.sums and key.shape[1] < query.shape[1]:
            scratch += [torch.empty_like(query), torch.empty_like(out)]
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _bytes(size: int, like: Tensor) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)
