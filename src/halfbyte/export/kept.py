"""How much of the adapter's update is in the weights that were stored.

The update of a weight is ΔW = merged - base. Rounding the sum may drop it: where the base's weights lie on the grid
that is rounded to, as dequantized NF4 does on NF4's, whatever is below half a step snaps back. Kept is the share

    ⟨stored(base + ΔW) - stored(base), ΔW⟩ / ⟨ΔW, ΔW⟩

over all weights that the adapter changes: 1 where rounding is right on average, 0 where nothing came through. What
single weights are off by adds to it at random; the standard error says how much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Sums over weights: of stored·ΔW, of ΔW², and of the squares of each weight's deviation from its share."""

    along: float = 0.0
    total: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, stored: Tensor, without: Tensor, update: Tensor) -> Kept:
        """fp32 tensors of one shape: the weight as stored, as stored without the update, and the update."""
        step = stored - without
        return cls(
            float((step * update).sum(dtype=torch.float64)),
            float(update.square().sum(dtype=torch.float64)),
            float(((step - update) * update).square().sum(dtype=torch.float64)),
        )

    @classmethod
    def sum(cls, parts: Iterable[Kept]) -> Kept:
        found = list(parts)
        return cls(*(math.fsum(getattr(each, name) for each in found) for name in ("along", "total", "spread")))

    @property
    def share(self) -> float:
        """1.0 where there is no update."""
        return self.along / self.total if self.total else 1.0

    @property
    def error(self) -> float:
        """Standard error of `share`."""
        return math.sqrt(self.spread) / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.share:.1%} of the update is kept (± {self.error:.1%})"
