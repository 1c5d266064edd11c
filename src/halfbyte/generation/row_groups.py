"""The interface of engines, and an engine that computes groups of rows by engines of their own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .images import PromptImages

# Rows, the first column, and the logits [rows, P, V] of these rows from that column of the prompts on.
WatchPrompt = Callable[[Sequence[int], int, Tensor], None]


class Engine(Protocol):
    """An engine for one batch. Prompts are left-padded to a common length."""

    def prefill(
        self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None = None, images: Mapping[int, PromptImages] = {}
    ) -> Tensor:
        """Return logits [B, V] after tokens int64 [B, T], whose first `padding` [B] entries are padding.

        Args:
            watch: called with the logits after every token, some rows and columns at a time.
            images: row → its images.
        """

    def step(self, tokens: Tensor) -> Tensor:
        """Return logits [B, V] after one more token per row, int64 [B]. The next call may overwrite them."""


Groups = Sequence[tuple[Sequence[int], Engine]]


class RowGroups:
    """An engine for rows that cannot be computed together.

    Args:
        split: returns the rows of each group with their engine, for tokens, padding and the rows that have images.
    """

    def __init__(self, split: Callable[[Tensor, Tensor, Collection[int]], Groups]):
        self.split = split
        self.groups: list[tuple[Tensor, Engine]] = []

    def prefill(
        self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None = None, images: Mapping[int, PromptImages] = {}
    ) -> Tensor:
        self.groups, group_logits = [], []
        for numbers, engine in self.split(tokens, padding, images.keys()):
            rows = torch.tensor(numbers, device=tokens.device)
            first = int(padding[rows].min())
            group_watch = None if watch is None else _watch_group(watch, numbers, first)
            group_images = {at: images[row] for at, row in enumerate(numbers) if row in images}
            group_logits.append(engine.prefill(tokens[rows, first:], padding[rows] - first, group_watch, group_images))
            self.groups.append((rows, engine))
        return self._joined(group_logits)

    def step(self, tokens: Tensor) -> Tensor:
        return self._joined([engine.step(tokens[rows]) for rows, engine in self.groups])

    def _joined(self, group_logits: Sequence[Tensor]) -> Tensor:
        """Return the logits of all rows in their order."""
        if len(group_logits) == 1:
            return group_logits[0]
        logits = group_logits[0].new_empty(sum(map(len, group_logits)), group_logits[0].shape[1])
        for (rows, _), rows_logits in zip(self.groups, group_logits, strict=True):
            logits[rows] = rows_logits
        return logits


def _watch_group(watch: WatchPrompt, numbers: Sequence[int], first: int) -> WatchPrompt:
    """Return a `watch` for a group of rows; their prompts start at column `first` of the batch."""
    return lambda rows, column, logits: watch([numbers[row] for row in rows], first + column, logits)
