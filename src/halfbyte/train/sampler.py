"""The order in which a run sees its rows, and the counts that go with each micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..batch import COUNTS
from ..data.streaming import RowStream
from ..methods.base import Collate, Method, Rows
from ..parallel.mesh import DATA_AXES, Mesh
from ..runs.metrics import TOKENS


class CountingCollator:
    """A collator that adds the counts of its rows as Python numbers, which stay on the host."""

    def __init__(self, method: Method, collate: Collate):
        self.method, self.collate = method, collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        return {**batch, COUNTS: {TOKENS: self.method.tokens(rows), **self.method.counts(batch)}}

    def blank(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of the same shapes without trained tokens, whose counts are 0."""
        batch = self.method.blank(batch)
        return {**batch, COUNTS: {TOKENS: 0, **self.method.counts(batch)}}


class RankBatches:
    """The micro-batches of one rank. All ranks have equally many; the last one of some ranks is blank.

    Attributes:
        total: number of micro-batches of all ranks, without blank ones.
    """

    def __init__(self, loader: DataLoader, blank: Callable[[dict[str, Any]], dict[str, Any]], own: int, total: int):
        self.loader, self.blank, self.own, self.total = loader, blank, own, total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = iter(self.loader)  # draws a random number, now
        return (batch if i < self.own else self.blank(batch) for i, batch in enumerate(loader))


def batches(
    rows: Rows | RowStream,
    size: int,
    collate: CountingCollator,
    mesh: Mesh,
    *,
    shuffled: int | None = None,
    skip: int = 0,
    pinned: bool = False,
) -> RankBatches:
    """Return this rank's collated batches of `size` rows; the last batch may be smaller.

    Args:
        shuffled: seed of the order; None: the order of `rows`. An epoch's seed is the run's plus its number, as in
            accelerate.
        skip: number of batches of all ranks to leave out at the beginning.
        pinned: use pinned memory, from which a GPU copies without blocking the host.
    """
    if isinstance(rows, RowStream):
        return _stream_batches(rows, size, collate, mesh, skip, pinned)
    sampler: Any = SequentialSampler(rows)
    if shuffled is not None:
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(shuffled))
    order = list(BatchSampler(sampler, size, drop_last=False))[skip:]
    own = order[mesh.coordinate(*DATA_AXES) :: mesh.degree(*DATA_AXES)]
    blank = order[-1:] if len(own) < math.ceil(len(order) / mesh.degree(*DATA_AXES)) else []
    mine: Any = own + blank
    loader: DataLoader = DataLoader(rows, batch_sampler=mine, collate_fn=collate, pin_memory=pinned)  # type: ignore[arg-type]
    return RankBatches(loader, collate.blank, len(own), len(order))


def _stream_batches(
    stream: RowStream, size: int, collate: CountingCollator, mesh: Mesh, skip: int, pinned: bool
) -> RankBatches:
    """Return this rank's micro-batches of a stream, in the order in which its rows come."""
    total, ways = stream.needed // size - skip, mesh.degree(*DATA_AXES)
    mine = _StreamedMicroBatches(stream, size, skip, mesh.coordinate(*DATA_AXES), ways)
    loader: DataLoader = DataLoader(mine, batch_size=None, collate_fn=collate, pin_memory=pinned)
    return RankBatches(loader, collate.blank, total // ways, total)


class _StreamedMicroBatches(IterableDataset):
    """Lists of `size` rows of a stream after the first `skip` lists: every `ways`-th one, from number `rank`."""

    def __init__(self, stream: RowStream, size: int, skip: int, rank: int, ways: int):
        self.stream, self.size = stream, size
        self.skip = skip
        self.rank, self.ways = rank, ways

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        rows = self.stream.rows(self.skip * self.size)
        for number in range(self.stream.needed // self.size - self.skip):
            batch = list(islice(rows, self.size))
            if number % self.ways == self.rank:
                yield batch
