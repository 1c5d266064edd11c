"""Pad the micro-batches of ranks that share collectives to one shape.

Where a forward or backward contains a collective, a rank that captures a CUDA graph records the collective that another
rank runs, and a rank that repeats a step blocks forever. So these ranks warm up, capture, replay and fall back in the
same step. They exchange the shapes of a step's micro-batches in one message between hosts; every rank pads its own to
the longest, which determines the step's time anyway; and remaining differences are part of the key of a graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..batch import (
    BOUNDS,
    COUNTS,
    INPUT_IDS,
    LONGEST,
    SYNCED_SHAPE,
    can_be_padded,
    entry_counts,
    padded,
    padded_bounds,
    padded_entries,
)
from ..data.collate import DOCUMENTS
from ..mesh.mesh import COLLECTIVE_AXES, Mesh

DIGEST_BITS = 48  # of a digest of shapes


@dataclass(frozen=True)
class SyncedShape:
    """Shape of one micro-batch, agreed across ranks.

    Attributes:
        shapes: numbers that identify it.
        size: number of elements in the largest tensor of any rank.
    """

    shapes: tuple[int, ...]
    size: int


def pad_to_longest(mesh: Mesh, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pad this step's micro-batches to the longest sequence on any rank, and add `SYNCED_SHAPE`.

    A collective along `COLLECTIVE_AXES`: every rank calls it with the same number of micro-batches. No device
    synchronization.
    """
    if not mesh.shares_collectives or not batches:
        return list(batches)
    shapes = [_Shape.of(batch) for batch in batches]
    gathered = mesh.gather_ints([number for shape in shapes for number in shape.numbers], COLLECTIVE_AXES)
    size = len(shapes[0].numbers)
    of_ranks = [
        [_Shape.of_numbers(numbers[start : start + size]) for numbers in gathered]
        for start in range(0, size * len(shapes), size)
    ]
    return list(map(_synced, batches, shapes, of_ranks))


@dataclass(frozen=True)
class _Shape:
    """Shape of one rank's micro-batch. A batch with columns that cannot be padded has `size` and `digest` only.

    Attributes:
        rows, width: sequences, and tokens of each.
        bounds, longest: length of `BOUNDS` and value of `LONGEST`; 0 where the batch has none.
        size: number of elements in the largest tensor.
        digest: hash of everything else.
        entries: `entry_counts`.
    """

    rows: int
    width: int
    bounds: int
    longest: int
    size: int
    digest: int
    entries: tuple[int, ...] = ()

    @property
    def numbers(self) -> list[int]:
        return [self.rows, self.width, self.bounds, self.longest, self.size, self.digest, *self.entries]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> _Shape:
        rows, width, bounds, longest, size, digest, *entries = numbers
        return cls(rows, width, bounds, longest, size, digest, tuple(entries))

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> _Shape:
        batch = {key: value for key, value in batch.items() if key != COUNTS}
        grows = can_be_padded(batch)
        rows, width = batch[INPUT_IDS].shape if grows else (0, 0)
        bounds, longest = (batch[BOUNDS[0]].numel(), batch[LONGEST[0]]) if BOUNDS[0] in batch else (0, 0)
        dtypes = sorted((key, str(value.dtype)) for key, value in batch.items() if isinstance(value, Tensor))
        hashed = dtypes if grows else sorted((key, _described(value)) for key, value in batch.items())
        digest = int.from_bytes(hashlib.sha256(repr(hashed).encode()).digest()[: DIGEST_BITS // 8])
        size = max((value.numel() for value in batch.values() if isinstance(value, Tensor)), default=0)
        return cls(rows, width, bounds * grows, longest * grows, size, digest, tuple(entry_counts(batch)))


def _described(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else repr(value)


def _synced(batch: dict[str, Any], shape: _Shape, shapes: Sequence[_Shape]) -> dict[str, Any]:
    """Return the batch padded to the longest of all ranks, if every rank's can be padded.

    Args:
        shape, shapes: of this rank's micro-batch, and of every rank's.
    """
    largest = max(shape.size for shape in shapes)
    if not all(shape.rows for shape in shapes):
        numbers = tuple(number for shape in shapes for number in shape.numbers)
        return {**batch, SYNCED_SHAPE: SyncedShape(numbers, largest)}
    width = max(shape.width for shape in shapes)
    bounds = max(shape.bounds + shape.rows * (width > shape.width) for shape in shapes)
    bounds = bounds and -(-(bounds - 1) // DOCUMENTS) * DOCUMENTS + 1  # one of few lengths, as in the collator
    # as the collator, round the longest document up to a power of two
    paddings = [width - shape.width for shape in shapes]
    rounded = [1 << (padding - 1).bit_length() if padding else 0 for padding in paddings]
    longest = max(max(shape.longest, length) for shape, length in zip(shapes, rounded, strict=True))
    entries = tuple(map(max, zip(*(shape.entries for shape in shapes), strict=True)))
    unpadded = (number for shape in shapes for number in (shape.rows, shape.digest))
    size = max(width * max(shape.rows for shape in shapes), largest)
    synced = padded(batch, width - shape.width) | padded_entries(batch, entries)
    if shape.bounds:
        starts = (padded_bounds(batch, shape.width, width - shape.width) or batch)[BOUNDS[0]]
        starts = torch.cat([starts, starts[-1:].expand(bounds - starts.numel())])  # empty documents
        synced |= dict.fromkeys(BOUNDS, starts) | dict.fromkeys(LONGEST, longest)
    return {**synced, SYNCED_SHAPE: SyncedShape((width, bounds, longest, *entries, *unpadded), size)}
