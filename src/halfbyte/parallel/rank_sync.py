"""Micro-batches of one shape in all processes that compute together, and decisions that are theirs in common.

Where a forward or a backward exchanges tensors, a process that captures a graph records what another would run, and one
that runs a step again waits for nobody. So such processes warm up, capture, replay and give up alike. They tell each
other the shapes of a step's micro-batches, in one message from host to host beside that of the counts; each makes its
own as wide as the widest, which all have to wait for anyway; and what still differs is part of the shape for which a
graph is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.collate import DOCUMENTS
from ..modeling.routers import REAL_TOKENS
from ..ops import IGNORE_INDEX
from ..train.sampler import COUNTS
from . import Mesh
from .context.model import bounds_of_longer

Batch = dict[str, Any]
AGREED = "agreed"  # in a micro-batch: what was agreed of its shapes
TOGETHER = ("shard", "context", "tensor")  # along these, forwards and backwards exchange tensors that a graph can hold
WIDE = ("input_ids", "labels", "position_ids", "attention_mask", REAL_TOKENS)  # [rows, width]
BOUNDS, LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
BITS = 48  # of a number that stands for shapes


@dataclass(frozen=True)
class Agreed:
    """Of a micro-batch in all processes.

    Attributes:
        shapes: what tells them from others.
        size: numbers in the largest tensor of any.
    """

    shapes: tuple[int, ...]
    size: int


class Alike:
    """The processes that compute together with this one.

    Args:
        mesh: of the run.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh

    @property
    def is_alone(self) -> bool:
        """Whether this process decides for itself."""
        return self.mesh.ways(*TOGETHER) == 1

    def agree(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches of a step, as wide as the widest of those that are computed beside them, with what was
        agreed. All processes call it, with as many; nothing waits for a device."""
        if self.is_alone or not batches:
            return list(batches)
        own = [_Shape.of(batch) for batch in batches]
        told = self.mesh.every([number for shape in own for number in shape.numbers], TOGETHER)
        each = len(fields(_Shape))
        columns = [[_Shape(*numbers[at : at + each]) for numbers in told] for at in range(0, each * len(own), each)]
        return [_grown(batch, shape, every) for batch, shape, every in zip(batches, own, columns, strict=True)]

    def any_says(self, said: bool) -> bool:
        """Whether one of the processes says so; all call it."""
        return bool(self.mesh.max(int(said), TOGETHER))


@dataclass(frozen=True)
class _Shape:
    """What a process tells of a micro-batch: rows, tokens of each, bounds of documents and tokens of the longest (0
    where it is not flat), numbers in its largest tensor, and one that stands for all else. Of one that is not of the
    kinds that can grow, the last two alone; others are 0."""

    rows: int
    width: int
    bounds: int
    longest: int
    size: int
    rest: int

    @classmethod
    def of(cls, batch: Batch) -> _Shape:
        batch = {key: value for key, value in batch.items() if key != COUNTS}
        grows = batch.keys() <= {*WIDE, *BOUNDS, *LONGEST} and "input_ids" in batch
        rows, width = batch["input_ids"].shape if grows else (0, 0)
        bounds, longest = (batch[BOUNDS[0]].numel(), batch[LONGEST[0]]) if BOUNDS[0] in batch else (0, 0)
        kinds = sorted((key, str(value.dtype)) for key, value in batch.items() if isinstance(value, Tensor))
        rest = kinds if grows else sorted((key, _described(value)) for key, value in batch.items())
        digest = hashlib.sha256(repr(rest).encode()).digest()
        size = max((value.numel() for value in batch.values() if isinstance(value, Tensor)), default=0)
        return cls(rows, width, bounds * grows, longest * grows, size, int.from_bytes(digest[: BITS // 8]))

    @property
    def numbers(self) -> tuple[int, ...]:
        return astuple(self)


def _described(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else repr(value)


def _grown(batch: Batch, own: _Shape, every: Sequence[_Shape]) -> Batch:
    """`batch` as wide as the widest, where all are of the kinds that can grow."""
    if not all(shape.rows for shape in every):
        numbers = tuple(number for shape in every for number in shape.numbers)
        return {**batch, AGREED: Agreed(numbers, max(shape.size for shape in every))}
    width = max(shape.width for shape in every)
    bounds = max(shape.bounds + shape.rows * (width > shape.width) for shape in every)
    bounds = bounds and -(-(bounds - 1) // DOCUMENTS) * DOCUMENTS + 1  # of few numbers, as the collator's
    longest = max(max(shape.longest, _up(width - shape.width)) for shape in every)
    numbers = (width, bounds, longest, *(number for shape in every for number in (shape.rows, shape.rest)))
    agreed = Agreed(numbers, width * max(shape.rows for shape in every))
    return {**_widened(batch, own, width, bounds, longest), AGREED: agreed}


def _widened(batch: Batch, own: _Shape, width: int, bounds: int, longest: int) -> Batch:
    """`batch` in rows of `width` tokens; of a flat one, its `bounds` are so many, and no document exceeds `longest`."""
    lacking, grown = width - own.width, dict(batch)
    if lacking:
        for name in WIDE:
            if name in batch:
                grown[name] = F.pad(batch[name], (0, lacking), value=IGNORE_INDEX if name == "labels" else 0)
        if "position_ids" in batch:  # what is added is a document
            added = torch.arange(lacking, device=batch["position_ids"].device).expand(own.rows, -1)
            grown["position_ids"] = torch.cat([batch["position_ids"], added], 1)
    if not own.bounds:
        return grown
    begins = (bounds_of_longer(batch, own.width, lacking) or batch)[BOUNDS[0]]
    begins = torch.cat([begins, begins[-1:].expand(bounds - begins.numel())])  # documents of no tokens
    return grown | dict.fromkeys(BOUNDS, begins) | dict.fromkeys(LONGEST, longest)


def _up(size: int) -> int:
    """The power of two that is not below it, as the collator gives the longest document."""
    return 1 << (size - 1).bit_length() if size else 0
