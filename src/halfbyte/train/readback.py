"""An optimizer step's numbers, read when the device has them, so that the host never waits for the step it launches.

Reading a loss right after its backward leaves the device idle while Python launches clipping, the optimizer and the
next forward. Here the numbers of step k are on their way while step k + 1 is launched. That a step with NaN or Inf
changes nothing is then decided on the device, by the protocol of torch.amp.GradScaler: a fused optimizer of torch
leaves weights, moments and step counts alone where its `found_inf` is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

ASYNCHRONOUS = ("cuda", "xpu")  # devices that run behind the host


def guard(optimizer: Any, numbers: Tensor) -> None:
    """Make the next `optimizer.step()` do nothing if one of `numbers` is NaN or Inf."""
    optimizer.found_inf = (~numbers.isfinite().all()).float()


class Mark:
    """The end of what was launched until now: a moment on the device's clock, or the host's where both are one."""

    def __init__(self, device: torch.device):
        self._now = perf_counter()
        self._event: Any = None
        if device.type in ASYNCHRONOUS:
            self._event = torch.get_device_module(device).Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Return when the device is there; nothing launched later is waited for."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier`, a mark of the same device, to this one; waits for it."""
        self.wait()
        if self._event is None:
            return self._now - earlier._now
        return earlier._event.elapsed_time(self._event) / 1e3


class StepNumbers:
    """What one optimizer step reports: counts that the host knows, and numbers that the device works out.

    Args:
        number: of the step, from 1.
        counts: of its rows: name → number.
        values: float32 [n + 1], the sums of the method's metrics and the gradient norm. From an accelerator they are
            copied to pinned memory; the host does not wait.
        own: begin and end of what this process, of several, computed by itself.

    Attributes:
        end: of the step, as far as it was launched.
    """

    def __init__(self, number: int, counts: Mapping[str, float], values: Tensor, own: tuple[Mark, Mark] | None = None):
        self.number, self.counts, self._own = number, counts, own
        self._values = values.to("cpu", non_blocking=values.device.type in ASYNCHRONOUS)
        self._read: list[float] | None = None
        self._device = values.device
        self.end = Mark(self._device)

    def finish(self) -> None:
        """The step ends here, after its optimizer."""
        self.end = Mark(self._device)

    @property
    def own_seconds(self) -> float:
        """How long that took; 0 in a process that is alone."""
        return self._own[1].seconds_since(self._own[0]) if self._own else 0.0

    def read(self) -> list[float]:
        """The values; the first call waits for what was launched of the step."""
        if self._read is None:
            self.end.wait()
            self._read = self._values.tolist()
        return self._read
