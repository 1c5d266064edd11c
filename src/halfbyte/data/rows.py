"""The training rows of a run in the order of its steps, as one protocol for tables and streams.

`RowTable` holds rows that are prepared before the run; `streaming.RowStream` reads them while it trains. Collating text
costs next to nothing. Rows with images are collated ahead in threads, since PIL and numpy release the interpreter's
lock while they decode, resize and normalise.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from ..batch import IMAGES

MOST_THREADS = 8  # that collate rows with images

Row = dict[str, Any]
Position = dict[str, Any]  # plain JSON values
Collate = Callable[[list[Row]], dict[str, Any]]


@dataclass(frozen=True)
class RankLoader:
    """The collated micro-batches of one rank.

    Attributes:
        loader: iterates them; if a rank has one less than others, it repeats the last micro-batch of the epoch.
        count: number of micro-batches without that repetition.
        total: number of micro-batches of all ranks.
    """

    loader: Iterable[dict[str, Any]]
    count: int
    total: int


def collating_threads() -> int:
    """Return the number of threads that collate rows with images: one per core, up to `MOST_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


@dataclass(frozen=True)
class PrefetchedBatches:
    """Batches that threads collate ahead, in the order of their rows.

    At most one batch per thread is ahead, so memory does not grow with the number of rows. An error of a
    thread is raised where its batch is taken.

    Attributes:
        rows: iterates the rows of each batch; a DataLoader draws a random number when its iteration begins.
        collate: called by several threads at a time.
        pinned: use pinned memory.
        threads: default: `collating_threads`.
    """

    rows: Iterable[list[Row]]
    collate: Collate
    pinned: bool = False
    threads: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._batches(iter(self.rows))

    def _batches(self, rows: Iterator[list[Row]]) -> Iterator[dict[str, Any]]:
        threads = self.threads or collating_threads()
        executor = ThreadPoolExecutor(threads, "images")
        pending: deque[Future[dict[str, Any]]] = deque()
        try:
            for batch_rows in rows:
                pending.append(executor.submit(self.collate, batch_rows))
                if len(pending) > threads:
                    yield self._ready(pending.popleft().result())
            while pending:
                yield self._ready(pending.popleft().result())
        finally:  # also if the run ends early
            executor.shutdown(cancel_futures=True)

    def _ready(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self.pinned:
            return batch
        return {name: value.pin_memory() if torch.is_tensor(value) else value for name, value in batch.items()}


class TrainingRows(Protocol):
    """The training rows of a run."""

    @property
    def row_count(self) -> int:
        """Number of rows of an epoch; 0 for a stream, which a run passes over once."""

    def position(self, row: int) -> Position | None:
        """Return the position that a checkpoint stores to continue with row number `row`, from 0; None for a table."""

    def resume(self, position: Position | None) -> None:
        """Continue at a `position`."""

    def load(
        self, size: int, collate: Collate, *, seed: int | None, skip: int, rank: int, ranks: int, pinned: bool
    ) -> RankLoader:
        """Return the micro-batches of one rank, of `size` rows each; the last one may be smaller.

        Args:
            seed: of the order of rows; None: as they are. Streams have their own order.
            skip: number of micro-batches of all ranks to leave out at the beginning.
            rank, ranks: the rank takes every `ranks`-th micro-batch, from number `rank` on.
            pinned: use pinned memory, from which a GPU copies without blocking the host.
        """


class StreamedRows(TrainingRows, Protocol):
    """The training rows of a run that reads them while it trains.

    Attributes:
        check: called with the rows of each block after the first; may raise.
    """

    check: Callable[[Any], None]

    def require(self, rows: int) -> None:
        """Set the number of rows that the run trains on; raise a ConfigError if the stream is known to be shorter."""


@dataclass(frozen=True)
class RowTable:
    """Training rows that are all prepared; an epoch has each row once."""

    rows: Sequence[Row]

    @property
    def row_count(self) -> int:
        return len(self.rows)

    def position(self, row: int) -> Position | None:
        return None

    def resume(self, position: Position | None) -> None:
        pass

    def load(
        self, size: int, collate: Collate, *, seed: int | None, skip: int, rank: int, ranks: int, pinned: bool
    ) -> RankLoader:
        sampler: Any = SequentialSampler(self.rows)
        if seed is not None:
            sampler = RandomSampler(self.rows, generator=torch.Generator().manual_seed(seed))
        micro_batches = list(BatchSampler(sampler, size, drop_last=False))[skip:]
        of_rank: Any = micro_batches[rank::ranks]
        count = len(of_rank)
        if count < math.ceil(len(micro_batches) / ranks):
            of_rank.append(micro_batches[-1])
        if IMAGES in getattr(self.rows, "column_names", ()):
            rows: DataLoader = DataLoader(self.rows, batch_sampler=of_rank, collate_fn=list)  # type: ignore[arg-type]
            return RankLoader(PrefetchedBatches(rows, collate, pinned), count, len(micro_batches))
        loader: DataLoader = DataLoader(self.rows, batch_sampler=of_rank, collate_fn=collate, pin_memory=pinned)  # type: ignore[arg-type]
        return RankLoader(loader, count, len(micro_batches))
