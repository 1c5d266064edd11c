"""Guards that end a run early: broken numbers, nothing to train on, a loss scale that no longer helps; and signals.

A step with NaN or Inf must not change any weight. `skip_if_not_finite` decides that on the device, so that the host
does not block; `StepGuards` raises on the host, when the step's numbers are read.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config.schema import RunKeys
from ..optim import optimizer_row
from ..runs import checkpoints
from ..utils.errors import TrainingError
from ..utils.notices import notice

MAX_SKIPPED = 20  # consecutive steps that float16 may skip: its first scale of 65536 is below 1 after 17
LEAVE_TIMEOUT = 5.0  # seconds that a step or an evaluation may continue after a signal


def announce_signal(number: int) -> None:
    """Print the effect of a signal. Runs in its handler, which may interrupt any write to stderr."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    words = f"\n{name}: the run saves a checkpoint after this step and ends (once more: it ends at once)\n"
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


def skip_if_not_finite(optimizer: Any, numbers: Tensor) -> None:
    """Make the next `optimizer.step()` do nothing if one of `numbers` is NaN or Inf, or the next backward that updates.

    Uses the protocol of torch.amp.GradScaler: a fused optimizer of torch changes neither weights nor moments nor step
    counts if its `found_inf` is 1.
    """
    optimizer.found_inf = (~numbers.isfinite().all()).float()


class StepGuards:
    """Raises a TrainingError if a run must not continue.

    Args:
        config: of the run.
        count_name: name of the count that the loss is divided by.
        sampled: whether rows are sampled completions. All completions of a step may have equal rewards, which gives a
            zero gradient.
    """

    def __init__(self, config: RunKeys, count_name: str, sampled: bool = False):
        self.config, self.count_name = config, count_name.replace("_", " ").removesuffix("s")
        self.sampled = sampled
        # name of the first parameter with a broken gradient, of an optimizer that updates in the backward and checks it
        self.first_broken: Callable[[], str | None] | None = None
        self._skipped = 0  # consecutive steps that float16's scaler skipped

    def check_empty(self, step: int, micro_batches: int) -> float:
        """Return the divisor of the loss of a step that has nothing to train on, if that may happen; else raise.

        A step of sampled completions of which none ended (`mask_truncated_completions`) has the loss 0, as in TRL.
        """
        if self.sampled:
            notice("nothing-ended", f"step {step}: no answer ended within max_completion_length, so it teaches nothing")
            return 1.0
        raise TrainingError(
            f"step {step} has no {self.count_name} in its {micro_batches} micro-batches",
            "look at the masks with `halfbyte preview`; rows cut by max_length may have lost their answers",
        )

    def check_held_out(self, step: int, loss_sum: float, count: float) -> None:
        """Raise if the held-out rows have nothing to evaluate, or their loss is NaN or Inf."""
        if not count:
            raise TrainingError(f"the held-out rows have no {self.count_name}", "look at them with `halfbyte preview`")
        if not math.isfinite(loss_sum):
            raise TrainingError(f"step {step}: the held-out loss is {loss_sum / count}", self.last_checkpoint())

    def check_numbers(self, step: int, loss_sum: float, norm: float, scaled: bool) -> None:
        """Raise if the loss or the gradient norm is NaN or Inf, or if step 1 has a zero gradient.

        An overflow of `scaled` gradients is allowed: the scaler skips that step.
        """
        if not math.isfinite(loss_sum) or not (math.isfinite(norm) or scaled):
            numbers = f"loss {loss_sum:.4g} (sum), gradient norm {norm:.4g}"
            raise TrainingError(
                f"step {step}: {numbers}; {self._what_changed(loss_sum)}",
                f"lower learning_rate ({self.config.learning_rate:g}); {self.last_checkpoint()}",
            )
        if step == 1 and norm == 0 and not self.sampled:
            raise TrainingError("step 1: no gradient reaches the trained weights", "check target_modules")

    def _what_changed(self, loss_sum: float) -> str:
        """Describe the weights that a step with this loss or with broken gradients has changed."""
        if optimizer_row(self.config).updates != "backward":
            return "stopped before updating any weight"
        if self.first_broken is None:
            return "the backward has updated the weights whose gradients are finite"
        name = self.first_broken()
        broken = "" if name is None else f"the first broken gradient is that of {name}; "
        if not math.isfinite(loss_sum):
            return f"{broken}stopped before updating any weight"
        return f"{broken}weights that the backward updated before it keep their update, and no other weight changed"

    def check_scale(self, step: int, norm: float, scale: float) -> None:
        """Raise if float16 skipped `MAX_SKIPPED` steps in a row, or skipped a step at a scale below 1.

        The scaler halves its scale after each overflow. If that does not end the overflows, nothing will.
        """
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped >= MAX_SKIPPED or (self._skipped and scale < 1):
            raise TrainingError(
                f"step {step}: the gradients of the last {self._skipped} steps are NaN or Inf in float16, down to a"
                f" loss scale of {scale:g}; a lower scale does not help, and no weight changed in these steps",
                f"set dtype: bfloat16 (float32 where the device lacks it); {self.last_checkpoint()}",
            )

    def last_checkpoint(self) -> str:
        """Describe the checkpoint that the run can continue from."""
        last = checkpoints.checkpoints(Path(self.config.output_dir))
        return f"the last checkpoint is {last[-1]}" if last else "there is no checkpoint yet"
