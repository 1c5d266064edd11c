"""Training and evaluation steps through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..parallel.pipeline.model import LocalStages
from ..parallel.pipeline.runtime import Pipeline
from .stepper import Batch, Stepper

Read = Callable[[Batch], Tensor]  # micro-batch → numbers [n], float32; called with the last stage installed


class PipelinedStepper(Stepper):
    """Runs the micro-batches of a step through stages, some of which are on this rank.

    All ranks of the pipeline must call it with the same micro-batches. Sums are those of the last stage, and zeros on
    other ranks. Blank micro-batches pad a window to a number that the schedule supports.

    Args:
        sums: micro-batch → named sums, 0-d.
        names: of the sums.
        blank: micro-batch → the same without trained tokens.
        around: returns the context manager of a forward.
        scaler: of the loss, in float16.
    """

    def __init__(
        self,
        sums: Callable[[Batch], Mapping[str, Tensor]],
        names: Sequence[str],
        blank: Callable[[Batch], dict[str, Any]],
        around: Callable[[], Any],
        pipeline: Pipeline,
        stages: LocalStages,
        scaler: torch.amp.GradScaler | None = None,
    ):
        super().__init__(sums, scaler)
        self.names, self.blank, self.around = tuple(names), blank, around
        self.pipeline, self.stages, self.evaluation_batches = pipeline, stages, 4 * pipeline.schedule.ranks

    has_all_layers = False

    def __call__(self, batches: Iterable[Batch], count: Tensor, may_capture: bool = False) -> Tensor:
        window = list(batches)
        window += [self.blank(window[-1])] * (self.pipeline.schedule.next_accepted(len(window)) - len(window))
        total = torch.zeros(len(self.names), device=self.pipeline.device)

        def forward(stage: int, batch: Batch, x: Tensor | None) -> Tensor:
            if stage < self.stages.last:
                return self._hidden(stage, batch, x)
            with self.stages.installed(stage, x):
                sums = self.sums(batch)
            total.add_(torch.stack([sums[name].detach() for name in self.names]))
            loss = sums["loss"] / count
            return loss if self.scaler is None else self.scaler.scale(loss)

        self.pipeline.step(window, forward)
        if self.scaler is not None and not self.pipeline.has_last:
            self.scaler.scale(
                torch.zeros((), device=self.pipeline.device)
            )  # creates the scale, which other ranks create with their first loss
        return total

    def evaluate(self, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        def read(batch: Batch) -> Tensor:
            sums = self.sums(batch)
            return torch.stack([sums[name] for name in self.names])

        found = self.map_last_stage(batches, read, len(self.names))
        return [dict(zip(self.names, sums.unbind(), strict=True)) for sums in found]

    @torch.no_grad()
    def map_last_stage(self, batches: Sequence[Batch], read: Read, numbers: int) -> Tensor:
        """Apply `read` to each micro-batch in the last stage; returns float32 [batches, numbers] on all ranks."""
        found = torch.zeros(len(batches), numbers, device=self.pipeline.device)
        rows = iter(found)

        def forward(stage: int, batch: Batch, x: Tensor | None) -> Tensor:
            if stage < self.stages.last:
                return self._hidden(stage, batch, x)
            with self.stages.installed(stage, x):
                return next(rows).copy_(read(batch))

        self.pipeline.evaluate(batches, forward)
        return self.pipeline.mesh.sum(found, ("pipeline",))

    def _hidden(self, stage: int, batch: Batch, x: Tensor | None) -> Tensor:
        with self.around():
            return self.stages.forward(stage, batch, x)
