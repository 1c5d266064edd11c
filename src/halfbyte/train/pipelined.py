"""A step through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.models.stages import Stages
from halfbyte.parallel.pipeline import Pipeline

from .stepper import Batch, Stepper


class PipelinedStepper(Stepper):
    """Runs the micro-batches of a step through stages, of which this process has some.

    Every process of the pipeline calls it with the same micro-batches, and gets the same sums. Where the schedule does
    not take as many as a window has, blank ones follow.

    Args:
        sums: micro-batch → named sums, 0-d; called in the last stage, while the model consists of that alone.
        names: of the sums.
        blank: a micro-batch → the same with nothing to train on.
        surroundings: the context of a forward.
        scaler: of the loss, in float16.
    """

    def __init__(
        self,
        sums: Callable[[Batch], Mapping[str, Tensor]],
        names: Sequence[str],
        blank: Callable[[Batch], dict[str, Any]],
        surroundings: Callable[[], Any],
        pipeline: Pipeline,
        stages: Stages,
        scaler: torch.amp.GradScaler | None = None,
    ):
        super().__init__(sums, scaler)
        self.names, self.blank, self.surroundings = tuple(names), blank, surroundings
        self.pipeline, self.stages = pipeline, stages

    def __call__(self, batches: Iterable[Batch], count: Tensor) -> Tensor:
        window = list(batches)
        window += [self.blank(window[-1])] * (self.pipeline.schedule.at_least(len(window)) - len(window))
        found: list[Tensor] = []
        self.pipeline.step(window, self._forward(found, count))
        if self.scaler is not None and not self.pipeline.has_last:
            self.scaler.scale(torch.zeros((), device=self.pipeline.device))  # it exists from its first loss on
        return self._everywhere(found).sum(0)

    def evaluate(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """The sums of each of `batches`, without gradients."""
        found: list[Tensor] = []
        self.pipeline.evaluate(batches, self._forward(found, torch.ones((), device=self.pipeline.device)))
        everywhere = self._everywhere(found, len(batches))
        return [dict(zip(self.names, sums.unbind(), strict=True)) for sums in everywhere]

    def _forward(self, found: list[Tensor], count: Tensor) -> Callable[[int, Batch, Tensor | None], Tensor]:
        """The forward of a stage; the last one adds its sums to `found`."""

        def forward(stage: int, batch: Batch, x: Tensor | None) -> Tensor:
            if stage < self.stages.last:
                with self.surroundings():
                    return self.stages.forward(stage, batch, x)
            with self.stages.alone(stage, x):
                sums = self.sums(batch)
            found.append(torch.stack([sums[name].detach() for name in self.names]))
            loss = sums["loss"] / count
            return loss if self.scaler is None else self.scaler.scale(loss)

        return forward

    def _everywhere(self, found: list[Tensor], batches: int = 1) -> Tensor:
        """[batches, sums] in all processes, of what the one with the last stage has found."""
        shape, line = (batches, len(self.names)), self.pipeline
        here = torch.stack(found) if found else torch.zeros(shape, device=line.device)
        if found and batches == 1:
            here = here.sum(0, keepdim=True)
        return line.mesh.sum(here, ("pipeline",))
