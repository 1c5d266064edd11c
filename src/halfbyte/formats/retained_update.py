"""The share of an update that remains after its sum with a weight is rounded to a format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RetainedUpdate:
    """How much of the adapter's update the stored weights contain; sums over weights.

    The update of a weight is ΔW = merged - base. Rounding may drop it: if the base's weights lie on the format's grid,
    as a dequantized NF4 base does on NF4's, updates below half a step snap back. The retained share is

        ⟨stored(base + ΔW) - stored(base), ΔW⟩ / ⟨ΔW, ΔW⟩

    over all weights that the adapter changes: 1 if rounding is unbiased, 0 if nothing is left. Rounding errors of
    single weights add noise, whose standard error is `error`.

    Attributes:
        along, total: sums of stored·ΔW and of ΔW².
        spread: sum of the squared deviations from the share.
    """

    along: float = 0.0
    total: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, stored: Tensor, without: Tensor, update: Tensor) -> RetainedUpdate:
        """Compare fp32 tensors: the stored weight, the stored weight without the update, and the update."""
        step = stored - without
        return cls(
            float((step * update).sum(dtype=torch.float64)),
            float(update.square().sum(dtype=torch.float64)),
            float(((step - update) * update).square().sum(dtype=torch.float64)),
        )

    @classmethod
    def sum(cls, updates: Iterable[RetainedUpdate]) -> RetainedUpdate:
        weights = list(updates)
        return cls(*(math.fsum(getattr(weight, name) for weight in weights) for name in ("along", "total", "spread")))

    @property
    def share(self) -> float:
        """Retained share of the update; 1.0 without an update."""
        return self.along / self.total if self.total else 1.0

    @property
    def error(self) -> float:
        """Standard error of `share`."""
        return math.sqrt(self.spread) / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.share:.1%} of the update is kept (± {self.error:.1%})"
