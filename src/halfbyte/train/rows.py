"""The order in which a run sees its rows, and the counts that go with each micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from halfbyte.methods.base import Collate, Method, Rows

from .metrics import TOKENS

COUNTS = "counts"  # of a batch: name → number, on the host


class Counting:
    """A collator that also counts, as plain numbers, which stay on the host."""

    def __init__(self, method: Method, collate: Collate):
        self.method, self.collate = method, collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        return {**batch, COUNTS: {TOKENS: self.method.tokens(rows), **self.method.counts(batch)}}


def batches(
    rows: Rows, size: int, collate: Collate, *, shuffled: int | None = None, skip: int = 0, pinned: bool = False
) -> DataLoader:
    """Collated batches of `size` rows, the last one of what is left.

    Args:
        shuffled: seed of the order; None: as they are. An epoch's is the run's seed plus its number, as accelerate
            has it.
        skip: batches to leave out at the beginning.
        pinned: in memory that a GPU can copy from while the host goes on.
    """
    sampler: Any = SequentialSampler(rows)
    if shuffled is not None:
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(shuffled))
    order = list(BatchSampler(sampler, size, drop_last=False))[skip:]
    return DataLoader(rows, batch_sampler=order, collate_fn=collate, pin_memory=pinned)  # type: ignore[arg-type]


def counts_of(batches: list[dict[str, Any]]) -> dict[str, float]:
    """Take the counts out of `batches`: their sums."""
    counts = [batch.pop(COUNTS) for batch in batches]
    return {name: sum(each[name] for each in counts) for name in counts[0]}
