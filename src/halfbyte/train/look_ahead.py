"""What the micro-batches of a step know of each other: numbers of all the step, from its counts or a look ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.data.collate_answers import AHEAD
from halfbyte.methods.base import Batch, Method
from halfbyte.modeling.adapters import compute_autocast
from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh


class Ahead:
    """Gives each micro-batch the numbers that a method shares among those of a step.

    Args:
        model: that trains, in matrix products of `dtype` (default: see `compute_autocast`).
    """

    def __init__(self, method: Method, model: nn.Module, dtype: torch.dtype | None = None, mesh: Mesh = SINGLE_PROCESS):
        self.method, self.model, self.dtype, self.mesh = method, model, dtype, mesh

    def shared(self, taken: list[dict[str, Any]], counts: Mapping[str, float]) -> list[dict[str, Any]]:
        """The micro-batches of a step with its numbers, 0-d on their device, and without what only `ahead` reads."""
        looks = self.method.looks_ahead and (self.mesh.size > 1 or self.method.needs_ahead(taken))
        numbers = self.method.shared(counts, self._ahead(taken) if looks else {})
        return [with_numbers(batch, numbers) for batch in taken]

    def of_all(self, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """The numbers of an evaluation over `batches`, which nothing is taken of by methods that do not look ahead."""
        return self.method.shared({}, self._ahead(batches)) if self.method.looks_ahead else {}

    @torch.no_grad()
    def _ahead(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """What the method's `ahead` gives of all of `batches`, those of other processes too."""
        found: dict[str, Tensor] = {}
        for batch in batches:
            with compute_autocast(self.model, self.dtype):
                sums = self.method.ahead(self.model, batch)
            found = {name: found.get(name, 0) + value for name, value in sums.items()}
        return {name: self.mesh.sum(value) for name, value in found.items()}


def with_numbers(batch: Batch, numbers: Mapping[str, float | Tensor]) -> dict[str, Any]:
    """A batch with `numbers`, 0-d on its device, instead of what was only needed to find them."""
    if not numbers:
        return dict(batch)
    device = next(value for value in batch.values() if isinstance(value, Tensor)).device
    found = {key: value for key, value in batch.items() if not key.startswith(AHEAD)}
    for name, value in numbers.items():  # a launch; a copy could wait
        found[name] = value if isinstance(value, Tensor) else torch.full((), value, device=device)
    return found
