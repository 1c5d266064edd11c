"""Rows cut along their tokens: each process of the axis `context` holds a slice of every row.

Tokens of a row meet in attention alone. Around it an all-to-all makes slices of all heads into whole rows of some
heads, and another turns the result back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3):

    q, k, v [B, H, T/n, D]  →  [B, H/n, T, D]  →  attention  →  [B, T, H/n, D]  →  [B, T/n, H, D]

Attention is a sum over keys for each head by itself, so whatever computes it stays as it is: windows, caps, documents
of packed rows, repeatable backwards. The gradient of an all-to-all is the all-to-all of the gradients. A process sends
(n − 1)/n of its (Hq + 2·Hk)·D and Hq·D numbers a token and layer, whatever the number of processes.

Fewer key heads than processes: each is sent to several (its gradients are summed). Heads that do not divide: heads of
zeros make up for what is lacking; they cost no time, since processes with a head less would wait for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...autograd.function import OnceFunction


@dataclass(frozen=True)
class Context:
    """The processes that hold the slices of a row, in their order.

    Attributes:
        ways: how many there are.
        group: their process group.
    """

    ways: int
    group: Any

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whole rows of this process's heads; every process of the group calls it.

        Args:
            query: [B, Hq, t, D], a slice of all heads.
            key, value: [B, Hk, t, D] and [B, Hk, t, E], Hk dividing Hq.

        Returns:
            query: [B, hq, ways · t, D], hq = ⌈Hq / ways⌉.
            key, value: [B, hk, ways · t, D] and [B, hk, ways · t, E], hk dividing hq.
        """
        again, lacking = self._fit(query.shape[1], key.shape[1])
        key, value = (x.repeat_interleave(again, 1) if again > 1 else x for x in (key, value))
        heads = (F.pad(x, (0, 0, 0, 0, 0, lacking)) if lacking else x for x in (query, key, value))
        slices = (x.unflatten(1, (self.ways, -1)).permute(1, 0, 3, 2, 4) for x in heads)  # [ways, B, t, h, D]
        rows = (x.transpose(0, 1).flatten(1, 2) for x in _Exchange.apply(self.group, *slices))
        query, key, value = (x.transpose(1, 2) for x in rows)
        return query, key, value

    def to_tokens(self, out: Tensor, heads: int) -> Tensor:
        """This process's slice of all heads.

        Args:
            out: [B, ways · t, h, D], whole rows of this process's heads.
            heads: of all processes.

        Returns:
            [B, t, heads, D].
        """
        slices = out.unflatten(1, (self.ways, -1)).transpose(0, 1)
        return _Exchange.apply(self.group, slices)[0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :heads]

    def _fit(self, heads: int, key_heads: int) -> tuple[int, int]:
        """How often each key head is sent, and how many heads of zeros follow."""
        lacking = -heads % self.ways
        most = heads if lacking else math.lcm(key_heads, self.ways)
        return most // key_heads, lacking


class _Exchange(OnceFunction):
    """Of each tensor [ways, …] part i goes to process i; part j of the result came from process j."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return _exchanged(tensors, group)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_exchanged(grads, ctx.group)


def _exchanged(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """Each is on its way while the next is laid out."""
    sent, received, works = [], [], []
    for tensor in tensors:
        sent.append(tensor.contiguous())
        received.append(torch.empty_like(sent[-1]))
        works.append(dist.all_to_all_single(received[-1], sent[-1], group=group, async_op=True))
    for work in works:
        work.wait()
    return tuple(received)
