"""The micro-batches that a memory plan is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Rows of a batch, and the tokens of each with padding."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Batches:
    """Micro-batches of a run, of no rows where there are none.

    Args:
        largest: decides what fits.
        usual: their mean, decides what is fast.
        second: the largest of those of another shape than `largest`.
        evaluation: the largest of an evaluation.
    """

    largest: Shape
    usual: Shape
    second: Shape = Shape(0, 0)
    evaluation: Shape = Shape(0, 0)

    @classmethod
    def alike(cls, rows: int, length: int) -> Batches:
        """All of one shape."""
        shape = Shape(rows, length)
        return cls(shape, shape)

    def longer(self, share: float) -> Batches:
        """All with `share` times the tokens."""
        shapes = (self.largest, self.usual, self.second, self.evaluation)
        return Batches(*(Shape(shape.rows, math.ceil(share * shape.length)) for shape in shapes))
