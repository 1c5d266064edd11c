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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..autograd.function import OnceFunction
from ..ops import IGNORE_INDEX
from .mesh import Mesh

CONTEXT = "context"  # in a batch: that its rows are cut, and among whom
WHOLE = "whole_"  # in a batch: before the name of what it holds of whole rows
OF_ATTENTION = ("position_ids", "attention_mask")  # what attention must know of whole rows


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


def slice_of(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """This process's slice of the rows of a batch; the batch itself where rows are not cut.

    Rows are padded on the right, with untrained tokens, to a multiple of the slices. Nothing waits for the device.

    Args:
        batch: `input_ids` and `labels` [B, T], and perhaps `attention_mask` and `position_ids` [B, T]; where documents
            begin, as transformers' flash attention is told; and more. Tensors [B, T, …] are cut, others left.

    Returns:
        The slice: its `position_ids` [B, t] are those within the row, or the document; `shift_labels` [B, t] take the
        place of `labels`: position i has the label of the token behind it, which may be in the next slice. Beside it
        `context`, and of whole rows what attention must know, named with `WHOLE`.
    """
    ways = mesh.ways(CONTEXT)
    if ways == 1:
        return dict(batch)
    rows, length = batch["input_ids"].shape
    lacking = -length % ways
    size = (length + lacking) // ways
    own = slice(mesh.place(CONTEXT) * size, (mesh.place(CONTEXT) + 1) * size)
    row = {name: _padded(value, lacking) if _is_of(value, rows, length) else value for name, value in batch.items()}
    row["shift_labels"] = F.pad(row.pop("labels")[:, 1:length], (0, 1 + lacking), value=IGNORE_INDEX)
    positions = torch.arange(length + lacking, device=row["input_ids"].device).expand(rows, -1)
    if "position_ids" in batch:  # the padding is a document
        row["position_ids"] = torch.cat([batch["position_ids"], positions[:, :lacking]], 1)
    whole = {WHOLE + name: row[name] for name in OF_ATTENTION if name in row} | bounds_of_longer(row, length, lacking)
    row = {"position_ids": positions} | row
    row.pop("attention_mask", None)
    cut = {name: value[:, own].contiguous() if _is_of(value, rows, length + lacking) else value
           for name, value in row.items()}  # fmt: skip
    return cut | whole | {CONTEXT: Context(ways, mesh.group(CONTEXT))}


def _is_of(value: Any, rows: int, length: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == (rows, length)


def _padded(value: Tensor, lacking: int) -> Tensor:
    return F.pad(value, (0, 0) * (value.dim() - 2) + (0, lacking))


def bounds_of_longer(batch: Mapping[str, Any], length: int, lacking: int) -> dict[str, Any]:
    """Where documents begin in rows that grew from `length` by `lacking` tokens, a document of their own; nothing where
    a batch does not say it, or does not grow. Nothing waits for the device."""
    if not lacking or batch.get("cu_seq_lens_q") is None:
        return {}
    bounds, rows = batch["cu_seq_lens_q"], len(batch["input_ids"])
    begins = length + (length + lacking) * torch.arange(rows, device=bounds.device, dtype=bounds.dtype)
    bounds = torch.cat([bounds + lacking * (bounds // length), begins]).sort().values
    longest = max(batch["max_length_q"], lacking)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
