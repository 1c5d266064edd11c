"""Shapes of a run's micro-batches: inputs of the memory plan and of CUDA graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..config.schema import RunKeys

MAX_GRAPHS = 24  # CUDA graphs of a run, one per batch shape; each holds its inputs, results and kernel parameters


@dataclass(frozen=True)
class Shape:
    """Number of sequences in a batch, and their padded length in tokens."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Batches:
    """Shapes of a run's micro-batches; a shape without rows means that there is none.

    Args:
        largest: the largest micro-batch, which determines peak memory.
        usual: the mean micro-batch, which determines speed.
        second: the largest micro-batch of another shape than `largest`.
        evaluation: the largest batch of an evaluation.
        prompts, held_out_prompts: lengths in tokens of the longest prompts that are sampled together, in training and
            in an evaluation; empty if rows are not prompts.
        many: whether there may be more shapes than `MAX_GRAPHS`.
        image_bytes: bytes of the tower's inputs of the micro-batch with the largest images.
    """

    largest: Shape
    usual: Shape
    second: Shape = Shape(0, 0)
    evaluation: Shape = Shape(0, 0)
    prompts: tuple[int, ...] = ()
    held_out_prompts: tuple[int, ...] = ()
    many: bool = False
    image_bytes: int = 0

    @classmethod
    def uniform(cls, rows: int, length: int) -> Batches:
        """Micro-batches that all have the same shape."""
        shape = Shape(rows, length)
        return cls(shape, shape)

    @classmethod
    def of_full_rows(cls, config: RunKeys) -> Batches:
        """Micro-batches of maximal length, for a run whose data is not known."""
        rows, length = config.per_device_train_batch_size, config.max_length
        return cls.uniform(1, rows * length) if config.padding_free else cls.uniform(rows, length)

    def longer(self, share: float) -> Batches:
        """The same micro-batches with every length multiplied by `share`."""
        shapes = (self.largest, self.usual, self.second, self.evaluation)
        largest, usual, second, evaluation = (Shape(s.rows, math.ceil(share * s.length)) for s in shapes)
        return replace(self, largest=largest, usual=usual, second=second, evaluation=evaluation)
