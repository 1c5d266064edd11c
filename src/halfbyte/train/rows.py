"""The order in which a run sees its rows, and the counts that go with each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from halfbyte.models.head import IGNORE_INDEX

TOKENS = "tokens"
TRAINED = "trained_tokens"

Rows = Sequence[dict[str, Any]]
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


class Counting:
    """A collator that also counts, as plain numbers, which stay on the host.

    `tokens` are the rows', which padding hides. `trained_tokens` are those with a label; the first position predicts
    nothing, wherever its label points.
    """

    def __init__(self, collate: Collate):
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        trained = int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())
        return {**batch, TOKENS: sum(len(row["input_ids"]) for row in rows), TRAINED: trained}


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
