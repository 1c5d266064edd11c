"""Training and evaluation steps through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..batch import Batch
from ..parallel.pipeline.model import LocalStages
from ..parallel.pipeline.runtime import Pipeline
from .stepper import Forward, Stepper, Sums

Read = Callable[[Batch], Tensor]  # micro-batch → numbers [n], float32; called with the last stage installed


class PipelinedStepper(Stepper):
    """Runs the micro-batches of a step through stages, some of which are on this rank.

    All ranks of the pipeline must call it with the same micro-batches. Sums are those of the last stage, and zeros on
    other ranks. Blank micro-batches pad a window to a number that the schedule supports.

    Args:
        names: of the sums.
        blank: micro-batch → the same without trained tokens.
        autocast: returns the context manager of a forward.
        grad_scaler: of the loss, in float16.
    """

    is_eager = False
    has_all_layers = False
    pipeline: Pipeline

    def __init__(
        self,
        names: Sequence[str],
        blank: Callable[[Batch], dict[str, Any]],
        autocast: Callable[[], AbstractContextManager[Any]],
        pipeline: Pipeline,
        stages: LocalStages,
        grad_scaler: torch.amp.GradScaler,
    ):
        self.names = tuple(names)
        self.blank = blank
        self.autocast = autocast
        self.pipeline = pipeline
        self.stages = stages
        self.grad_scaler = grad_scaler
        self.evaluation_batches = 4 * pipeline.schedule.ranks

    def forward_backward(
        self, forward: Forward, batches: Iterable[Batch], loss_count: Tensor, may_capture: bool = False
    ) -> Tensor:
        window = list(batches)
        window += [self.blank(window[-1])] * (self.pipeline.schedule.next_accepted(len(window)) - len(window))
        total = torch.zeros(len(self.names), device=self.pipeline.device)

        def stage_forward(stage: int, batch: Batch, x: Tensor | None) -> Tensor:
            if stage < self.stages.last:
                return self._hidden(stage, batch, x)
            with self.stages.installed(stage, x):
                loss, sums = forward(batch, loss_count)
            total.add_(sums)
            return loss

        self.pipeline.step(window, stage_forward)
        if not self.pipeline.has_last:  # creates float16's scale, which other ranks create with their first loss
            self.grad_scaler.scale(torch.zeros((), device=self.pipeline.device))
        return total

    def evaluate(self, sums: Sums, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        def read(batch: Batch) -> Tensor:
            values = sums(batch)
            return torch.stack([values[name] for name in self.names])

        rows = self.map_last_stage(batches, read, len(self.names))
        return [dict(zip(self.names, row.unbind(), strict=True)) for row in rows]

    @torch.no_grad()
    def map_last_stage(self, batches: Sequence[Batch], read: Read, count: int) -> Tensor:
        """Apply `read` to each micro-batch in the last stage; returns float32 [batches, count] on all ranks."""
        numbers = torch.zeros(len(batches), count, device=self.pipeline.device)
        rows = iter(numbers)

        def stage_forward(stage: int, batch: Batch, x: Tensor | None) -> Tensor:
            if stage < self.stages.last:
                return self._hidden(stage, batch, x)
            with self.stages.installed(stage, x):
                return next(rows).copy_(read(batch))

        self.pipeline.evaluate(batches, stage_forward)
        return self.pipeline.mesh.sum(numbers, ("pipeline",))

    def _hidden(self, stage: int, batch: Batch, x: Tensor | None) -> Tensor:
        with self.autocast():
            return self.stages.forward(stage, batch, x)
