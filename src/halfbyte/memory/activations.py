"""Inputs of activation-memory planning: the levels of activation checkpointing and the shapes of micro-batches.

A level determines which activations a decoder layer saves for the backward. `plan.policy` gives the cost of each. Each
level saves less and recomputes more than the one before:

    keep               save all tensors that the backward reads
    recompute          recompute the normalized inputs of attention and MLP in one elementwise pass each
    recompute_mlp      save only the input of the MLP; recompute gate and up as well
    checkpoint         save only the layer's input; recompute all but the last GEMM (`autograd.checkpointing`)

offload_kept, offload_attention and offload save the same tensors as recompute, recompute_mlp and checkpoint, in pinned
host memory (`memory.offload`). The copies take as long as the forward of three layers for offload_kept, and of one
layer for offload_attention, so layers of offload_kept alternate with other levels. The last level is

    tiled              offload, with the MLP running over `TILE_ROWS` tokens at a time to bound its inner tensors
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from ..config import Level
from ..config.schema import RunKeys

LEVELS: tuple[Level, ...] = get_args(Level)
OFFLOADED: dict[str, Level] = {  # level → the level whose saved tensors it moves to the host
    "offload_kept": "recompute",
    "offload_attention": "recompute_mlp",
    "offload": "checkpoint",
    "tiled": "checkpoint",
}
TILE_ROWS = 8192  # tokens

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
    """

    largest: Shape
    usual: Shape
    second: Shape = Shape(0, 0)
    evaluation: Shape = Shape(0, 0)
    prompts: tuple[int, ...] = ()
    held_out_prompts: tuple[int, ...] = ()
    many: bool = False

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
        largest, usual, second, evaluation = (Shape(each.rows, math.ceil(share * each.length)) for each in shapes)
        return replace(self, largest=largest, usual=usual, second=second, evaluation=evaluation)
