"""Save and load the state in a checkpoint: weights, optimizer, schedule, loss scale, fp8 scales, random states.

The files are those of transformers' Trainer, except that weights keep their own dtype (PEFT's loader would convert
bfloat16 adapters to float32). Which checkpoint to use is decided in `runs.checkpoints`, without torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers.trainer_pt_utils import safe_globals

from ..adapters.lora import load_adapter_weights, save_adapter
from ..modeling.rope_scaling import write_overrides
from ..ops.fp8_scaling import DelayedScaling
from ..reading.boundary import answered
from ..reading.tensors import read_state, read_tensors
from ..runs.checkpoints import EARLIER
from ..runs.layout import FP8_SCALING as SCALING
from ..runs.layout import OPTIMIZER_STATE as OPTIMIZER
from ..runs.layout import SCALER_STATE as SCALER
from ..runs.layout import SCHEDULER_STATE as SCHEDULE
from ..runs.layout import random_state
from ..runs.manifest import write_manifest
from ..utils.files import new_directory
from .checks import saved_weights

State = dict[str, Any]


def loading(checkpoint: Path) -> AbstractContextManager[None]:
    """Return a context for loading a checkpoint's state that turns torch's errors into CheckpointErrors.

    Raises:
        CheckpointError: the state does not fit this run; names the folder.
    """
    return answered(f"cannot load the state in {checkpoint}", EARLIER)


@contextmanager
def new_checkpoint(folder: Path, step: int) -> Iterator[Path]:
    """Yield a temporary folder for the files of a checkpoint; then write its manifest and rename it to `folder`.

    Raises:
        TrainingError: a file cannot be written (a full disk).
    """
    with new_directory(folder) as temporary:
        yield temporary
        write_manifest(temporary, step)


def save_weights(
    model: Any, folder: Path, weights: Mapping[str, Tensor] | None = None, *, scaled: bool = False
) -> None:
    """Save the adapter; in full fine-tuning all weights.

    Args:
        weights: the adapter's full weights, if other ranks have parts of it.
        scaled: whether the run scales the base's RoPE, which an adapter's folder then describes.
    """
    if isinstance(model, PeftModel):
        save_adapter(model, folder, weights)
        if scaled:
            write_overrides(folder, model.config)
    else:
        model.save_pretrained(folder)


@torch.no_grad()
def load_weights(model: Any, folder: Path, skip: Callable[[str], bool] | None = None) -> None:
    """Load the weights that `save_weights` saved.

    Args:
        skip: as in `load_adapter_weights`.

    Raises:
        CheckpointError: they cannot be read, or are another model's.
    """
    if isinstance(model, PeftModel):
        load_adapter_weights(model, folder, skip=skip)
        return
    with loading(folder):
        weights = model.state_dict()
        for name, tensor in saved_weights(model, folder):
            weights[name].copy_(tensor)


def save_optimizer(folder: Path, optimizer: State, schedule: Any, grad_scaler: torch.amp.GradScaler) -> None:
    _save(optimizer, folder / OPTIMIZER)
    _save(schedule.state_dict(), folder / SCHEDULE)
    if grad_scaler.is_enabled():
        _save(grad_scaler.state_dict(), folder / SCALER)


def _save(state: Any, path: Path) -> None:
    """Save with torch through a Python file, whose errors keep the system's reason."""
    with open(path, "wb") as file:
        torch.save(state, file)


def load_optimizer(
    folder: Path,
    optimizer: Any,
    schedule: Any,
    grad_scaler: torch.amp.GradScaler,
    local_part: Callable[[State], State],
) -> None:
    """Load the states that `save_optimizer` saved.

    Args:
        local_part: full optimizer state → the part of this rank.

    Raises:
        CheckpointError: they cannot be read, or are another model's.
    """
    with loading(folder):
        state = local_part(read_state(folder / OPTIMIZER, EARLIER))
        optimizer.load_state_dict(state)
        if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
            # It casts all state to the parameter's dtype, but transformers' Adafactor, for example, keeps float32
            # moments of bfloat16 weights: load those again.
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            indices = [index for group in state["param_groups"] for index in group["params"]]
            for index, parameter in zip(indices, parameters, strict=True):
                loaded = optimizer.state[parameter] if index in state["state"] else {}
                for name, value in loaded.items():
                    exact = state["state"][index][name]
                    if isinstance(value, Tensor) and isinstance(exact, Tensor) and value.dtype != exact.dtype:
                        loaded[name] = exact.to(value.device)
        schedule.load_state_dict(read_state(folder / SCHEDULE, EARLIER))
        if grad_scaler.is_enabled() and (folder / SCALER).is_file():
            grad_scaler.load_state_dict(read_state(folder / SCALER, EARLIER))


def random_states() -> dict[str, Any]:
    """Return the random states of Python, NumPy, torch and the current GPU."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["cpu"] = torch.random.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the random states that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _random_file(folder: Path, rank: int) -> Path:
    return folder / random_state(rank)


def save_random(folder: Path, states: Sequence[dict[str, Any]]) -> None:
    """Save the random states of all ranks."""
    for rank, state in enumerate(states):
        _save(state, _random_file(folder, rank))


def load_random(folder: Path, rank: int = 0) -> None:
    """Load the random states that `save_random` saved; a rank without a saved state keeps its current one.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = _random_file(folder, rank)
    if rank and not file.is_file():
        return
    with loading(folder):
        with safe_globals():
            states = read_state(file, EARLIER)
        set_random_states(states)


def save_scaling(folder: Path, state: Mapping[str, Tensor] | None) -> None:
    """Save the amax histories and scales of recipe fp8-hybrid for the full model; None: the run has none."""
    if state is not None:
        save_file(dict(state), folder / SCALING)


def load_scaling(
    checkpoint: Path,
    scaling: DelayedScaling | None,
    local_part: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> None:
    """Load the scales that `save_scaling` saved.

    Args:
        local_part: full state → the part of this rank; default: all.

    Raises:
        CheckpointError: they cannot be read, or are another model's.
    """
    if scaling is not None:
        with loading(checkpoint):
            scaling.load_state_dict(local_part(read_tensors(checkpoint / SCALING, EARLIER)))
