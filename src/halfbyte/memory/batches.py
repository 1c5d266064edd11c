"""The micro-batches that a memory plan is made for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..config import RunConfig

GRAPHS = 24  # CUDA graphs that a run keeps, one a shape: each holds its inputs, its results and its kernels' parameters


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
        many: whether they may have more shapes than there are graphs.
        evaluation: the largest of an evaluation.
        prompts, held_out_prompts: tokens of the longest prompts that are answered together, in training and in an
            evaluation; none where rows are not prompts.
    """

    largest: Shape
    usual: Shape
    second: Shape = Shape(0, 0)
    evaluation: Shape = Shape(0, 0)
    prompts: tuple[int, ...] = ()
    held_out_prompts: tuple[int, ...] = ()
    many: bool = False

    @classmethod
    def alike(cls, rows: int, length: int) -> Batches:
        """All of one shape."""
        shape = Shape(rows, length)
        return cls(shape, shape)

    @classmethod
    def of_full_rows(cls, config: RunConfig) -> Batches:
        """Where the rows of a run are not known."""
        rows, length = config.per_device_train_batch_size, config.max_length
        return cls.alike(1, rows * length) if config.padding_free else cls.alike(rows, length)

    def longer(self, share: float) -> Batches:
        """All with `share` times the tokens."""
        shapes = (self.largest, self.usual, self.second, self.evaluation)
        largest, usual, second, evaluation = (Shape(each.rows, math.ceil(share * each.length)) for each in shapes)
        return replace(self, largest=largest, usual=usual, second=second, evaluation=evaluation)
