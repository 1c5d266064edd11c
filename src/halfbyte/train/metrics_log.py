"""The numbers of steps, read one step late, and the records that are made of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from halfbyte.methods.base import Numbers
from halfbyte.parallel.mesh import AXES, Mesh

from .callbacks import Callbacks
from .early_stop import Stops
from .metrics import MetricsFile, Window, peak_memory
from .readback import Mark, StepNumbers
from .stepper import Stepper
from .time_breakdown import Shares, shares_of


class Rollouts(Protocol):
    """The part of `rl.rollouts.Generations` that records ask: `taken` gives numbers of the rows of a record."""

    mismatch: Any

    def taken(self) -> dict[str, float]: ...


class Records:
    """Takes each step as it is launched, reads it when the next one is, and writes the records that are due.

    Attributes:
        window: the steps since the last record.
        norm: the last gradient norm that was read.
        mean_losses: the sum of the steps' mean losses.
        shares: of the time of this process, of several.
    """

    def __init__(
        self,
        file: MetricsFile,
        callbacks: Callbacks,
        numbers: Numbers,
        stops: Stops,
        device: torch.device,
        mesh: Mesh,
        scaled: bool,
        rollouts: Rollouts | None = None,
    ):
        self.file, self.callbacks, self.numbers, self.stops = file, callbacks, numbers, stops
        self.device, self.mesh, self.scaled = device, mesh, scaled
        self.window = Window.of(numbers.trained)
        self.norm = math.nan
        self.mean_losses = 0.0
        self.rollouts = rollouts
        self.shares = Shares(None, {})
        self._own = 0.0  # seconds that this process, of several, computed by itself since the last record
        self._launched: StepNumbers | None = None  # the step being launched, from its gradient norm on
        self._unread: StepNumbers | None = None  # the step before
        self._since = Mark(device)  # until when the window counts the time
        self._due: float | None = None  # learning rate of a record that waits for its step's numbers
        self._beside: dict[str, float] = {}  # of that record

    def watch(self, model: Any, stepper: Stepper) -> None:
        """From the next step on know what its time goes into, where several processes train."""
        self.shares = shares_of(self.mesh, self.device, model, stepper)

    def begin(self) -> None:
        """The rows of a step are taken; after a pause, time counts from here, else from the end of the step before."""
        if self._unread is None:
            self._since = Mark(self.device)

    def launch(self, step: StepNumbers) -> None:
        """A step's numbers are on their way: read the step before, while the device is busy with this one."""
        self._launched = step
        self.read()

    def finish(self, rate: float | None) -> None:
        """The launched step ends here, after its optimizer.

        Args:
            rate: its learning rate, if a record is due.
        """
        assert self._launched is not None
        self._launched.finish()
        self._unread, self._launched, self._due = self._launched, None, rate
        if rate is not None:  # before the next rows are there
            self._beside = self.rollouts.taken() if self.rollouts else {}

    def check(self, step: StepNumbers) -> list[float]:
        """The step's sums.

        Raises:
            TrainingError: see `Stops.check_numbers`.
        """
        *sums, self.norm = step.read()
        self.stops.check_numbers(step.number, sums[0], self.norm, self.scaled)
        return sums

    def read(self) -> None:
        """Take the unread step into the window, and write the record that is due.

        At that time the state is still that step's own: the next one counts after its optimizer.
        """
        step, rate = self._unread, self._due
        self._unread = self._due = None
        metrics = self.numbers.trained
        if step is not None:
            sums = dict(zip((metric.name for metric in metrics), self.check(step), strict=True))
            self.mean_losses += sums[metrics[0].name] / (step.counts[metrics[0].over] or 1)
            if self.rollouts:
                self.rollouts.mismatch.saw(sums, step.counts)
            self.window.add(sums, step.counts, step.end.seconds_since(self._since))
            self._since = step.end
            self._own += step.own_seconds
        if rate is not None:
            window, self.window = self.window, Window.of(metrics)
            norm = self.norm if math.isfinite(self.norm) else None  # float16's overflows: JSON has no Inf
            rates = {"grad_norm": norm, "learning_rate": rate}
            record = window.means(metrics) | self._beside | rates | window.totals() | self._of_all(window.steps)
            self.write("train", record)
            self.callbacks.log(record)

    def _of_all(self, steps: int) -> dict[str, float]:
        """The most memory that any process took; and of several, how long the fastest and the slowest one computed in a
        step of the window before it summed gradients with the others, and the means of their `shares`."""
        own, self._own = self._own / max(steps, 1), 0.0
        shares = self.mesh.sum(found, AXES) if (found := self.shares.read()) else {}
        most = self.mesh.max({"memory_bytes": peak_memory(self.device), "slowest_seconds": own, "fastest": -own})
        fastest = -most.pop("fastest")
        if self.mesh.size == 1:
            del most["slowest_seconds"]
            return most
        return most | {"fastest_seconds": fastest} | {name: each / self.mesh.size for name, each in shares.items()}

    def read_all(self) -> None:
        """The run ends early: what was not finished is dropped, what was is recorded; but not in a process of several,
        which may end alone: the others are in other collectives than a record's."""
        self._launched = None
        if self.mesh.size == 1:
            self.read()

    def write(self, kind: str, numbers: Mapping[str, Any]) -> None:
        """A record of metrics.jsonl."""
        state = self.callbacks.state
        position = {"step": state.global_step, "epoch": state.epoch or 0.0, "time": time.time()}
        if self.mesh.is_main:
            self.file.append({"kind": kind, **position, **numbers})
