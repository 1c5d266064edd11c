"""transformers' callbacks (`report_to`, and those that are added), told of our loop as of its Trainer's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from halfbyte.parallel.mesh import SINGLE_PROCESS, Mesh


class Callbacks:
    """Calls every callback for an event, with the state of the run; what they want is in `control`.

    transformers' DefaultFlowCallback is the first of them: it says when a step is logged, evaluated or saved.

    Args:
        reports: whether this process is the one that tells `report_to`.
    """

    def __init__(self, args: TrainingArguments, model: Any, reports: bool = True):
        self.args, self.control = args, TrainerControl()
        self.state = self._new_state()
        reporting = get_reporting_integration_callbacks(args.report_to) if reports else []
        self.handler = CallbackHandler([DefaultFlowCallback, *reporting], model, None, None, None)
        self("on_init_end")

    def __call__(self, event: str, **keys: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **keys)

    def _new_state(self) -> TrainerState:
        return TrainerState(stateful_callbacks=[self.control])

    def begin(self, saved: Path | None, *, steps: int, epochs: int, optimizer: Any, schedule: Any) -> None:
        """A training of `steps` steps in all begins, or goes on from the state in the file `saved`.

        How often things happen is what the arguments say, not that state: it may change in a resumed run.
        """
        state = self.state = self._new_state() if saved is None else TrainerState.load_from_json(str(saved))
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, steps)
        state.max_steps, state.num_train_epochs = steps, epochs
        self.handler.optimizer, self.handler.lr_scheduler = optimizer, schedule

    def log(self, numbers: dict[str, Any]) -> None:
        """Hand on `numbers` of the present step, and keep them in the state."""
        numbers = {**numbers, "epoch": self.state.epoch}
        self.state.log_history.append({**numbers, "step": self.state.global_step})
        self("on_log", logs=numbers)


@contextlib.contextmanager
def noisy_embeddings(model: Any, alpha: float | None, mesh: Mesh = SINGLE_PROCESS) -> Iterator[None]:
    """NEFTune (Jain et al. 2023): while `model` trains, noise on its embeddings, of α / √(tokens of a row · width)."""
    if alpha is None:
        yield
        return
    handle = activate_neftune(model, alpha / math.sqrt(mesh.degree("context")))  # it sees slices of rows
    try:
        yield
    finally:
        deactivate_neftune(model, handle)
