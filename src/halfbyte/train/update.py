"""The end of a training step: clip the gradients, guard against broken numbers, and step the optimizer.

`Update` launches all of that from Python. `GraphedUpdate` replays it as one CUDA graph, after the graphs of the
micro-batches: several hundred adapter matrices would otherwise cost the host a millisecond a step. It is a graph of its
own, so that each shape of a micro-batch is captured once, however the shapes of a step are combined.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mesh.reduction import is_norm_distributed
from ..optim import Optimizer
from ..optim.fused import FusedOptimizer
from ..parallel.shard.optimizer import ReplicatedOptimizer
from ..utils.notices import notice
from .graph import GraphedOptimizer
from .guards import skip_if_not_finite
from .stepper import GraphedStepper, Stepper


class Update:
    """Clips, guards and steps, launched from Python.

    Args:
        optimizer: of the trained parameters.
        row: its row of the table.
        units: clips the gradients.
        max_norm: 2-norm to clip to; math.inf: the norm is only computed.
        scaler: loss scaler of float16.
        announce: called before the optimizer's step.

    Attributes:
        skips_on_device: whether a step with NaN or Inf changes nothing on the device, so that the host need not wait.
    """

    def __init__(
        self,
        optimizer: Any,
        row: Optimizer,
        units: ReplicatedOptimizer,
        max_norm: float,
        scaler: torch.amp.GradScaler | None,
        announce: Callable[[], Any],
    ):
        self.optimizer, self.row, self.units, self.scaler = optimizer, row, units, scaler
        self.max_norm, self.announce = max_norm, announce
        self.skips_on_device = scaler is None and row.guarded

    def numbers(self, sums: Tensor, may_capture: bool) -> Tensor:
        """Clip the gradients; returns the reduced `sums` [n] and the gradients' norm before clipping, [n + 1]."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        backward = self.row.updates == "backward"
        norm = self.optimizer.gradient_norm() if backward else self.units.clip(self.max_norm)
        numbers = torch.cat([sums, norm.to(sums).reshape(1)])
        if self.skips_on_device:  # float16's scaler skips broken steps itself
            skip_if_not_finite(self.optimizer, numbers)
        return numbers

    def step(self) -> None:
        """Step the optimizer."""
        self.announce()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def close(self) -> None:
        """Free what training held."""


class GraphedUpdate(Update):
    """Clips, guards and steps in `numbers`, as one CUDA graph that ends with zeroed gradients. `step` does nothing.

    The optimizer is a `FusedOptimizer` with its state on the device, on one rank or replicated.
    """

    def __init__(self, *args: Any, stepper: GraphedStepper):
        super().__init__(*args)
        self.gradients = stepper.graphs.gradients
        self.graph = GraphedOptimizer(self._whole, self.optimizer)

    def numbers(self, sums: Tensor, may_capture: bool) -> Tensor:
        self.announce()
        found = self.graph(sums, may_capture)
        self.gradients.are_zero = True
        return found

    def _whole(self, sums: Tensor) -> Tensor:
        numbers = super().numbers(sums, may_capture=False)
        self.optimizer.step()
        self.optimizer.found_inf = None  # it must not keep memory of the graph alive
        self.gradients.zero()
        return numbers

    def step(self) -> None:
        pass

    def close(self) -> None:
        self.graph.drop()


def make_update(
    optimizer: Any,
    row: Optimizer,
    units: ReplicatedOptimizer,
    max_norm: float,
    stepper: Stepper,
    announce: Callable[[], Any],
) -> Update:
    """Return the end of a run's steps; captured in a CUDA graph if the micro-batches are, else a notice says why."""
    arguments = optimizer, row, units, max_norm, stepper.scaler, announce
    if not isinstance(stepper, GraphedStepper):
        return Update(*arguments)
    if (reason := _why_not_captured(optimizer, units)) is None:
        return GraphedUpdate(*arguments, stepper=stepper)
    notice("optimizer-graph", f"the optimizer runs outside of the CUDA graphs of a step: {reason}")
    return Update(*arguments)


def _why_not_captured(optimizer: Any, units: ReplicatedOptimizer) -> str | None:
    if not isinstance(optimizer, FusedOptimizer):
        return f"{type(optimizer).__name__} needs memory or numbers that a graph cannot hold"
    if any(group["offload"] for group in optimizer.param_groups):
        return "its state is in host memory"
    if type(units) is not ReplicatedOptimizer or is_norm_distributed(units.mesh, units.parameters):
        return "its state or gradients are divided among processes"
    return None
