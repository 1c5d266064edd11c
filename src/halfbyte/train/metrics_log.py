"""The numbers of steps: read one step late, and written as records of metrics.jsonl.

Reading a loss right after its backward leaves the device idle while Python launches clipping, the optimizer and the
next forward. Here the numbers of step k are copied to the host while step k + 1 is launched.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..memory.allocators import process_memory, reset_process_peak
from ..mesh.mesh import AXES, Mesh
from ..methods.base import Numbers
from ..parallel.shard.model import sharded
from ..rl.dataset import RolloutDataset
from ..runs.metrics import MetricsFile, Window
from .callbacks import Callbacks
from .guards import StepGuards
from .stepper import Stepper

ASYNCHRONOUS = ("cuda", "xpu")  # device types that execute asynchronously
BREAKDOWN_INTERVAL = 10  # steps from one time breakdown to the next
GATHERS, IDLE = "gather_share", "idle_share"


class MetricsLog:
    """Takes each step when it is launched, reads it while the next one is, and writes the records that are due.

    Attributes:
        window: the steps since the last record.
        norm: the last gradient norm that was read.
        mean_losses: sum of the steps' mean losses.
        breakdown: shares of a step's time, if several ranks train.
    """

    def __init__(
        self,
        file: MetricsFile,
        callbacks: Callbacks,
        numbers: Numbers,
        guards: StepGuards,
        device: torch.device,
        mesh: Mesh,
        grad_scaler: torch.amp.GradScaler,
        rollouts: RolloutDataset | None = None,
    ):
        self.file = file
        self.callbacks = callbacks
        self.numbers = numbers
        self.guards = guards
        self.device = device
        self.mesh = mesh
        self.grad_scaler = grad_scaler
        self.window = Window.of(numbers.trained)
        self.norm = math.nan
        self.mean_losses = 0.0
        self.rollouts = rollouts
        self.breakdown = TimeBreakdown(None, {})
        self._local_seconds = 0.0  # seconds since the last record that this rank computed without other ranks
        self._launched: StepNumbers | None = None  # the step being launched, from its gradient norm on
        self._unread: StepNumbers | None = None  # the step before
        self._since = TimeMark(device)  # end of the time that the window has counted
        self._due: float | None = None  # learning rate of a record whose numbers are not read yet
        self._rollout_numbers: dict[str, float] = {}  # of the record that is due

    def start(self, model: Any, stepper: Stepper) -> None:
        """Measure the time breakdown of the steps from here on, if several ranks train."""
        self.breakdown = time_breakdown(self.mesh, self.device, model, stepper)

    def begin_step(self) -> None:
        """Start counting time after a pause; without a pause time counts from the end of the previous step."""
        if self._unread is None:
            self._since = TimeMark(self.device)

    def launch(self, number: int, counts: Mapping[str, float], values: Tensor, check: bool) -> None:
        """Take a step that is being launched; the one before has been read. Arguments as in `StepNumbers`.

        Args:
            check: whether to block until the values are on the host, and check them.

        Raises:
            TrainingError: see `StepGuards.check_numbers` and `StepGuards.check_scale`.
        """
        assert self._unread is None
        self._launched = StepNumbers(number, counts, values, self.breakdown.last_step)
        if check:
            self._check(self._launched)
            if self.grad_scaler.is_enabled():
                self.guards.check_scale(number, self.norm, self.grad_scaler.get_scale())

    def finish(self, rate: float) -> None:
        """End the launched step, after its optimizer with the learning rate `rate`."""
        assert self._launched is not None
        self._launched.finish()
        self._unread = self._launched
        self._launched = None
        state = self.callbacks.state
        if self.callbacks.control.should_log or state.global_step >= state.max_steps:
            self._due = rate
            # before the next rows are sampled
            self._rollout_numbers = self.rollouts.take_numbers() if self.rollouts else {}

    def _check(self, step: StepNumbers) -> list[float]:
        *sums, self.norm = step.read()
        self.guards.check_numbers(step.number, sums[0], self.norm, self.grad_scaler.is_enabled())
        return sums

    def read(self) -> None:
        """Add the unread step to the window, and write the record that is due.

        The trainer state is still that step's: `global_step` increases after the next step's optimizer.
        """
        step, rate = self._unread, self._due
        self._unread = self._due = None
        metrics = self.numbers.trained
        if step is not None:
            sums = dict(zip((metric.name for metric in metrics), self._check(step), strict=True))
            self.mean_losses += sums[metrics[0].name] / (step.counts[metrics[0].over] or 1)
            if self.rollouts:
                self.rollouts.add_step(sums, step.counts)
            self.window.add(sums, step.counts, step.end.seconds_since(self._since))
            self._since = step.end
            self._local_seconds += step.local_seconds
        if rate is not None:
            window, self.window = self.window, Window.of(metrics)
            norm = self.norm if math.isfinite(self.norm) else None  # overflow in float16: JSON has no Inf
            rates = {"grad_norm": norm, "learning_rate": rate}
            ranks = self._across_ranks(window.steps)
            record = window.means(metrics) | self._rollout_numbers | rates | window.totals() | ranks
            self.write("train", record)
            self.callbacks.log(record)

    def _across_ranks(self, steps: int) -> dict[str, float]:
        """Return the largest memory of any rank, bytes.

        With several ranks also the seconds per step that the fastest and the slowest rank computed before summing
        gradients with others, and the mean time breakdown.
        """
        local, self._local_seconds = self._local_seconds / max(steps, 1), 0.0
        memory_bytes = peak_memory(self.device)
        if self.mesh.size == 1:
            return {"memory_bytes": memory_bytes}
        shares = self.breakdown.read()
        shares = self.mesh.sum(shares, AXES) if shares else {}
        largest = self.mesh.max({"memory_bytes": memory_bytes, "slowest_seconds": local, "fastest_seconds": -local})
        largest["fastest_seconds"] = -largest["fastest_seconds"]
        return largest | {name: share / self.mesh.size for name, share in shares.items()}

    def flush(self) -> None:
        """Record the finished steps when the run ends early, and drop the unfinished one.

        With several ranks nothing is recorded: a record is a collective, and other ranks may be in another one.
        """
        self._launched = None
        if self.mesh.size == 1:
            self.read()

    def write(self, kind: str, numbers: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        state = self.callbacks.state
        position = {"step": state.global_step, "epoch": state.epoch or 0.0, "time": time.time()}
        if self.mesh.is_main:
            self.file.append({"kind": kind, **position, **numbers})


# --- numbers of a step -----------------------------------------------------------------------------------------------


class TimeMark:
    """The time at which the work launched so far ends, by the device's clock; on a CPU the current time."""

    def __init__(self, device: torch.device):
        self._now = perf_counter()
        self._event: torch.Event | None = None
        if device.type in ASYNCHRONOUS:
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Block until the device reaches the mark; work launched later may still run."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: TimeMark) -> float:
        """Return the seconds from `earlier`, a mark of the same device, to this one; blocks until this one."""
        self.wait()
        if self._event is None or earlier._event is None:
            return self._now - earlier._now
        return earlier._event.elapsed_time(self._event) / 1e3


class StepNumbers:
    """The numbers of one optimizer step: counts that the host knows, and values that the device computes.

    Args:
        number: of the step, from 1.
        counts: name → number over the step's rows.
        values: float32 [n + 1], the sums of the method's metrics and the gradient norm. They are copied from an
            accelerator to pinned memory without blocking the host.
        local: start and end of the part that this rank computed without others; None with one rank.

    Attributes:
        end: end of the step, as far as it was launched.
    """

    def __init__(
        self, number: int, counts: Mapping[str, float], values: Tensor, local: tuple[TimeMark, TimeMark] | None = None
    ):
        self.number = number
        self.counts = counts
        self._local = local
        self._values = values.to("cpu", non_blocking=values.device.type in ASYNCHRONOUS)
        self._read: list[float] | None = None
        self._device = values.device
        self.end = TimeMark(self._device)

    def finish(self) -> None:
        """Set the end of the step to now, after its optimizer."""
        self.end = TimeMark(self._device)

    @property
    def local_seconds(self) -> float:
        """Seconds that this rank computed without others; 0 with one rank."""
        return self._local[1].seconds_since(self._local[0]) if self._local else 0.0

    def read(self) -> list[float]:
        """Return the values; the first call blocks until the launched part of the step is done."""
        if self._read is None:
            self.end.wait()
            self._read = self._values.tolist()
        return self._read


# --- time of a step by ranks -----------------------------------------------------------------------------------------

Span = tuple[TimeMark, TimeMark]


class Watched(Protocol):
    """A component that enters the context `watch` around each piece of its work, except while a graph is captured."""

    watch: Any


def time_breakdown(mesh: Mesh, device: torch.device, model: Any, stepper: Stepper) -> TimeBreakdown:
    """Return the time breakdown of a run's layout."""
    watched: dict[str, Watched] = {}
    if (share := sharded(model)) is not None:
        watched[GATHERS] = share.stats
    if stepper.pipeline is not None:
        watched[IDLE] = stepper.pipeline
    return TimeBreakdown(device if mesh.size > 1 else None, watched)


class TimeBreakdown:
    """Share of a step in which this rank gathers weights, or idles in a pipeline.

    Measured in one step of `BREAKDOWN_INTERVAL`, with device events around each gather and each piece of a stage's
    work, without blocking.

    Args:
        device: device whose clock counts; None: nothing is measured, since there is one rank.
        watched: component by share. `GATHERS` is the share of its work, `IDLE` the rest of the step.

    Attributes:
        last_step: start and end of the last step's part that this rank computed without others.
    """

    def __init__(self, device: torch.device | None, watched: Mapping[str, Watched]):
        self.device, self.watched = device, watched
        self.last_step: Span | None = None
        self._spans: dict[str, list[Span]] = {}
        self._measured: tuple[Span, dict[str, list[Span]]] | None = None

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure the forwards and backwards of step `number`, from 1."""
        if self.device is None:
            yield
            return
        watched = self.watched if number % BREAKDOWN_INTERVAL == 1 else {}
        self._spans = {name: [] for name in watched}
        for name, component in watched.items():
            component.watch = partial(self._span, self._spans[name])
        began = TimeMark(self.device)
        try:
            yield
        finally:
            for component in watched.values():
                del component.watch
        self.last_step = began, TimeMark(self.device)
        if watched:
            self._measured = self.last_step, self._spans

    @contextlib.contextmanager
    def _span(self, spans: list[Span], *_: Any) -> Iterator[None]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            yield
            return
        assert self.device is not None
        began = TimeMark(self.device)
        yield
        spans.append((began, TimeMark(self.device)))

    def read(self) -> dict[str, float]:
        """Return the shares of the last measured step, once; blocks until its end."""
        if self._measured is None:
            return {}
        (step_start, step_end), spans_of = self._measured
        self._measured = None
        step_seconds = step_end.seconds_since(step_start)
        shares = {}
        for name, spans in spans_of.items():
            if spans:  # a replayed CUDA graph has none
                share = sum(end.seconds_since(start) for start, end in spans) / step_seconds
                shares[name] = 1 - share if name == IDLE else share
        return shares


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_memory(device: torch.device) -> int:
    """Return the peak of held bytes: of torch's allocator on an accelerator, of the process on a CPU."""
    if device.type in ASYNCHRONOUS:
        return torch.get_device_module(device).max_memory_allocated(device)
    return process_memory().peak


def reserved_memory(device: torch.device) -> dict[str, int]:
    """Return the peak that torch's allocator reserved on an accelerator, including its cache and graph pools."""
    if device.type not in ASYNCHRONOUS:
        return {}
    return {"reserved_bytes": torch.get_device_module(device).max_memory_reserved(device)}


def run_peaks(device: torch.device, base_bytes: int, graph_bytes: int) -> dict[str, int]:
    """Return the memory that a run used, bytes; the plan predicts `run_bytes`.

    Args:
        base_bytes: held before the run.
        graph_bytes: peak of its CUDA graphs.
    """
    peak = peak_memory(device)
    graphs = {"graph_pool_bytes": graph_bytes} if graph_bytes else {}
    return {"peak_bytes": peak, "run_bytes": peak - base_bytes} | graphs | reserved_memory(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to what is held now; outside of Linux, the peak of a process on a CPU cannot be reset."""
    if device.type in ASYNCHRONOUS:
        torch.get_device_module(device).reset_peak_memory_stats(device)
    else:
        reset_process_peak()


def current_memory(device: torch.device) -> int:
    """Return the bytes held now, counted as `peak_memory` counts them."""
    if device.type in ASYNCHRONOUS:
        return torch.get_device_module(device).memory_allocated(device)
    return process_memory().current
