"""The micro-batches of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..data.rows import RankLoader, TrainingRows
from ..mesh.mesh import DATA_AXES, Mesh
from ..methods.base import CountingCollator


class RankBatches:
    """The micro-batches of one rank. All ranks have equally many; the last one of some ranks is blank.

    Attributes:
        total: number of micro-batches of all ranks, without blank ones.
    """

    def __init__(self, rank: RankLoader, collate: CountingCollator):
        self.rank = rank
        self.blank = collate.blank
        self.total = rank.total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        loader = iter(self.rank.loader)  # draws a random number, now
        return (batch if i < self.rank.count else self.blank(batch) for i, batch in enumerate(loader))


def batches(
    rows: TrainingRows,
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
        skip, pinned: as in `TrainingRows.load`.
    """
    rank, ranks = mesh.coordinate(*DATA_AXES), mesh.degree(*DATA_AXES)
    loaded = rows.load(size, collate, seed=shuffled, skip=skip, rank=rank, ranks=ranks, pinned=pinned)
    return RankBatches(loaded, collate)
