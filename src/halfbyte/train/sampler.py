"""The order in which a run sees its rows, and the counts that go with each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from halfbyte.batch import COUNTS
from halfbyte.methods.base import Collate, Method, Rows

from ..parallel.mesh import DATA_AXES, Mesh
from .metrics import TOKENS


class Counting:
    """A collator that also counts, as plain numbers, which stay on the host."""

    def __init__(self, method: Method, collate: Collate):
        self.method, self.collate = method, collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        return {**batch, COUNTS: {TOKENS: self.method.tokens(rows), **self.method.counts(batch)}}

    def blank(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of the same shapes that counts for nothing."""
        batch = self.method.blank(batch)
        return {**batch, COUNTS: {TOKENS: 0, **self.method.counts(batch)}}


class Share:
    """The micro-batches of one process. All processes have as many, the last of some being blank.

    Attributes:
        total: micro-batches of all processes, without blank ones.
    """

    def __init__(self, loader: DataLoader, blank: Callable[[dict[str, Any]], dict[str, Any]], own: int, total: int):
        self.loader, self.blank, self.own, self.total = loader, blank, own, total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = iter(self.loader)  # draws a random number, now
        return (batch if i < self.own else self.blank(batch) for i, batch in enumerate(loader))


def batches(
    rows: Rows,
    size: int,
    collate: Counting,
    mesh: Mesh,
    *,
    shuffled: int | None = None,
    skip: int = 0,
    pinned: bool = False,
) -> Share:
    """Collated batches of `size` rows, the last one of what is left, dealt to the processes in turn.

    Args:
        shuffled: seed of the order; None: as they are. An epoch's is the run's seed plus its number, as accelerate
            has it.
        skip: batches of all processes to leave out at the beginning.
        pinned: in memory that a GPU can copy from while the host goes on.
    """
    sampler: Any = SequentialSampler(rows)
    if shuffled is not None:
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(shuffled))
    order = list(BatchSampler(sampler, size, drop_last=False))[skip:]
    own = order[mesh.coordinate(*DATA_AXES) :: mesh.degree(*DATA_AXES)]
    blank = order[-1:] if len(own) < math.ceil(len(order) / mesh.degree(*DATA_AXES)) else []
    mine: Any = own + blank
    loader: DataLoader = DataLoader(rows, batch_sampler=mine, collate_fn=collate, pin_memory=pinned)  # type: ignore[arg-type]
    return Share(loader, collate.blank, len(own), len(order))
