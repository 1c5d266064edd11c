"""The files of a checkpoint that continuing needs: weights, optimizer, schedule, loss scale and random states.

Names and contents are those of transformers' Trainer, except that weights keep their own dtype (PEFT's loader would
turn bfloat16 adapters into float32).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers.trainer_pt_utils import safe_globals

from halfbyte.modeling.adapters import load_adapter_weights, save_adapter
from halfbyte.reading.tensors import read_state

from ..runs.layout import OPTIMIZER_STATE as OPTIMIZER
from ..runs.layout import SCALER_STATE as SCALER
from ..runs.layout import SCHEDULER_STATE as SCHEDULE
from ..runs.layout import random_state
from . import checkpoint as checkpoints
from .checks import saved_weights

State = dict[str, Any]


def save_weights(model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Adapters only; all weights in full fine-tuning.

    Args:
        weights: of the adapters, where other processes have parts of them.
    """
    if isinstance(model, PeftModel):
        save_adapter(model, folder, weights)
    else:
        model.save_pretrained(folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path, skip: Callable[[str], bool] | None = None) -> None:
    """What `save_weights` wrote.

    Args:
        skip: as in `load_adapter_weights`.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    if isinstance(model, PeftModel):
        return load_adapter_weights(model, folder, skip=skip)
    with checkpoints.reading(folder):
        own = model.state_dict()
        for name, tensor in saved_weights(model, folder):
            own[name].copy_(tensor)


def save_optimizer(folder: Path, optimizer: State, schedule: Any, scaler: torch.amp.GradScaler | None) -> None:
    _save(optimizer, folder / OPTIMIZER)
    _save(schedule.state_dict(), folder / SCHEDULE)
    if scaler is not None:
        _save(scaler.state_dict(), folder / SCALER)


def _save(state: Any, path: Path) -> None:
    """Through Python's file: where it cannot be written torch keeps the system's reason, which its own file loses."""
    with open(path, "wb") as file:
        torch.save(state, file)


def load_optimizer(
    folder: Path,
    optimizer: Any,
    schedule: Any,
    scaler: torch.amp.GradScaler | None,
    own_part: Callable[[State], State],
) -> None:
    """What `save_optimizer` wrote.

    Args:
        own_part: of the state of one process's optimizer, what this one takes.

    Raises:
        CheckpointError: it cannot be read, or is of another model.
    """
    with checkpoints.reading(folder):
        optimizer.load_state_dict(own_part(read_state(folder / OPTIMIZER, checkpoints.EARLIER)))
        schedule.load_state_dict(read_state(folder / SCHEDULE, checkpoints.EARLIER))
        if scaler is not None and (folder / SCALER).is_file():
            scaler.load_state_dict(read_state(folder / SCALER, checkpoints.EARLIER))


def random_states() -> dict[str, Any]:
    """Those of Python, NumPy and torch; of a GPU, the current one's."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["cpu"] = torch.random.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _random_file(folder: Path, rank: int) -> Path:
    return folder / random_state(rank)


def save_random(folder: Path, states: Sequence[dict[str, Any]]) -> None:
    """Those of all processes, by rank."""
    for rank, own in enumerate(states):
        _save(own, _random_file(folder, rank))


def load_random(folder: Path, rank: int = 0) -> None:
    """Go on with the random numbers of `save_random`; a process that was not there then keeps its own.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = _random_file(folder, rank)
    if rank and not file.is_file():
        return
    with checkpoints.reading(folder):
        with safe_globals():
            states = read_state(file, checkpoints.EARLIER)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.random.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
