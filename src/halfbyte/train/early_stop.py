"""What ends a run early: before a weight moves, broken numbers, nothing to train on, a scale that no longer helps; and
being asked to leave."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from pathlib import Path

from halfbyte.config import RunConfig
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.notices import notice

from . import checkpoint as checkpoints

SKIPS = 20  # steps in a row that float16 may skip: the scale of 65536 that it begins with is below 1 after 17

PATIENCE = 5.0  # seconds that a step or an evaluation may go on when the process is asked to leave


def announce(number: int) -> None:
    """Say what a signal brings about; for its handler, which may interrupt anything that writes to stderr."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    words = f"\n{name}: the run saves a checkpoint after this step and ends (once more: it ends at once)\n"
    with contextlib.suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, words.encode())


class Stops:
    """Raises a TrainingError where a run must not go on.

    Args:
        config: of the run.
        what: name of the count that the loss is divided by.
        sampled: whether rows are sampled answers. All answers of a step may have equal rewards, which gives no gradient.
    """

    def __init__(self, config: RunConfig, what: str, sampled: bool = False):
        self.config, self.what = config, what.replace("_", " ").removesuffix("s")
        self.sampled = sampled
        self._skipped = 0  # steps in a row, by float16's scaler

    def check_count(self, step: int, count: float, micro_batches: int) -> float:
        """Return what a step's loss is divided by. A step must have something to learn, unless its answers are sampled:
        where none of them ended in time (`mask_truncated_completions`), it is a step with the loss 0, as in TRL."""
        if not count and self.sampled:
            notice("nothing-ended", f"step {step}: no answer ended within max_completion_length, so it teaches nothing")
            return 1.0
        if not count:
            raise TrainingError(
                f"step {step} has no {self.what} in its {micro_batches} micro-batches",
                "look at the masks with `halfbyte preview`; rows cut by max_length may have lost their answers",
            )
        return count

    def check_held_out(self, step: int, loss_sum: float, count: float) -> None:
        """So must the held-out rows, and their loss must be a number."""
        if not count:
            raise TrainingError(f"the held-out rows have no {self.what}", "look at them with `halfbyte preview`")
        if not math.isfinite(loss_sum):
            raise TrainingError(f"step {step}: the held-out loss is {loss_sum / count}", self.last_checkpoint())

    def check_numbers(self, step: int, loss_sum: float, norm: float, scaled: bool) -> None:
        """Loss and gradient norm must be finite, but for an overflow of `scaled` gradients, which is skipped; and a
        gradient must reach the trained weights."""
        if not math.isfinite(loss_sum) or not (math.isfinite(norm) or scaled):
            numbers = f"loss {loss_sum:.4g} (sum), gradient norm {norm:.4g}"
            raise TrainingError(
                f"step {step}: {numbers}; stopped before updating any weight",
                f"lower learning_rate ({self.config.learning_rate:g}); {self.last_checkpoint()}",
            )
        if step == 1 and norm == 0 and not self.sampled:
            raise TrainingError("step 1: no gradient reaches the trained weights", "check target_modules")

    def check_scale(self, step: int, norm: float, scale: float) -> None:
        """float16 skips a step whose gradients overflow and halves its scale, which ends overflows, but nothing else:
        it must not skip `SKIPS` steps in a row, or have a scale below 1."""
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped >= SKIPS or (self._skipped and scale < 1):
            raise TrainingError(
                f"step {step}: the gradients of the last {self._skipped} steps were NaN or Inf in float16, at a"
                f" loss scale down to {scale:g}: no overflow that scaling ends, and no weight has moved since",
                f"set dtype: bfloat16 (float32 where the device lacks it); {self.last_checkpoint()}",
            )

    def last_checkpoint(self) -> str:
        """Where the run could go on from, in words."""
        last = checkpoints.checkpoints(Path(self.config.output_dir))
        return f"the last checkpoint is {last[-1]}" if last else "there is no checkpoint yet"
