"""Context parallelism: each rank of the mesh axis `context` holds a slice of every sequence's tokens.

Only attention mixes tokens. Before it, an all-to-all turns slices of all heads into full sequences of some heads; after
it, another one turns the result back (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv:2309.14509, section 3):

    q, k, v [B, H, T/n, D]  →  [B, H/n, T, D]  →  attention  →  [B, T, H/n, D]  →  [B, T/n, H, D]

Heads are independent, so the attention itself is unchanged: windows, softcaps, documents of packed sequences,
deterministic backwards. The gradient of an all-to-all is the all-to-all of the gradients. A rank sends (n − 1)/n of its
(Hq + 2·Hk)·D and Hq·D numbers per token and layer.

With fewer key heads than ranks, each key head is sent to several ranks and its gradients are summed. If n does not
divide the heads, zero heads pad them; this costs no time, since ranks with fewer heads would idle.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..autograd.function import OnceFunction


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that hold the slices of a sequence, in order.

    Attributes:
        degree: number of ranks.
        group: process group, or `ThreadGroup` if the ranks are threads.
    """

    degree: int
    group: Any

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange slices of all heads for full sequences of this rank's heads; all ranks must call it.

        Args:
            query: [B, Hq, t, D], a slice of all heads.
            key, value: [B, Hk, t, D] and [B, Hk, t, E], Hk dividing Hq.

        Returns:
            query: [B, hq, degree · t, D], hq = ⌈Hq / degree⌉.
            key, value: [B, hk, degree · t, D] and [B, hk, degree · t, E], hk dividing hq.
        """
        padding = -query.shape[1] % self.degree  # zero heads
        sent = query.shape[1] if padding else math.lcm(key.shape[1], self.degree)
        repeats = sent // key.shape[1]  # of each key head
        key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
        heads = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (query, key, value))
        slices = (x.unflatten(1, (self.degree, -1)).permute(1, 0, 3, 2, 4) for x in heads)  # [degree, B, t, h, D]
        rows = (x.transpose(0, 1).flatten(1, 2) for x in _AllToAll.apply(self.group, *slices))
        query, key, value = (x.transpose(1, 2) for x in rows)
        return query, key, value

    def to_tokens(self, out: Tensor, heads: int) -> Tensor:
        """Exchange full sequences of this rank's heads for this rank's slice of all heads; all ranks must call it.

        Args:
            out: [B, degree · t, h, D].
            heads: number of heads on all ranks.

        Returns:
            [B, t, heads, D].
        """
        slices = out.unflatten(1, (self.degree, -1)).transpose(0, 1)
        return _AllToAll.apply(self.group, slices)[0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :heads]


class ThreadGroup:
    """The exchange of `degree` threads of a process that act as ranks, one object for each.

    Attributes:
        rank: of this thread.
        sent: the tensors of each thread.
        barrier: of all threads. A thread that raises aborts it, so that no other thread blocks.
    """

    def __init__(self, rank: int, sent: list[Sequence[Tensor]], barrier: threading.Barrier):
        self.rank = rank
        self.sent = sent
        self.barrier = barrier

    @classmethod
    def create(cls, degree: int) -> list[ThreadGroup]:
        """Return the objects of `degree` threads."""
        sent: list[Sequence[Tensor]] = [()] * degree
        barrier = threading.Barrier(degree)
        return [cls(rank, sent, barrier) for rank in range(degree)]

    def all_to_all(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.sent[self.rank] = tensors
        self.barrier.wait()
        received = tuple(torch.stack([x[self.rank] for x in parts]) for parts in zip(*self.sent, strict=True))
        self.barrier.wait()  # before a thread sends again
        return received


class _AllToAll(OnceFunction):
    """All-to-all of tensors [degree, …]: rank i receives entry i, and entry j of the result is from rank j."""

    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return _all_to_all(tensors, group)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_all_to_all(grads, ctx.group)


def _all_to_all(tensors: Sequence[Tensor], group: Any) -> tuple[Tensor, ...]:
    """Exchange tensors; each transfer overlaps the layout change of the next tensor."""
    if isinstance(group, ThreadGroup):
        return group.all_to_all(tensors)
    sent: list[Tensor] = []
    received: list[Tensor] = []
    works: list[Any] = []
    for tensor in tensors:
        sent.append(tensor.contiguous())
        received.append(torch.empty_like(sent[-1]))
        works.append(dist.all_to_all_single(received[-1], sent[-1], group=group, async_op=True))
    for work in works:
        work.wait()
    return tuple(received)
