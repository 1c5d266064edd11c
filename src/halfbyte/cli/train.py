"""`halfbyte train`."""

from __future__ import annotations

import signal
from pathlib import Path

from ..config import RunConfig
from ..console import Console
from ..signals import Stopped
from ..train.checkpoint import checkpoints
from ..train.look_over import look_over_run
from .imports import quick_imports


def train_run(config: RunConfig, file: Path, resume: bool) -> None:
    """Train, and where a signal ends it say what is saved and how to go on."""
    again: str | bool | None = True if resume else config.resume_from_checkpoint
    look_over_run(config, again)
    with quick_imports():
        from ..train.sft import train

    try:
        train(config, resume=again, console=Console(outlives_reader=True))
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        raise Stopped(number, _what_is_saved(config.output_path, file)) from None


def _what_is_saved(folder: Path, file: Path) -> str:
    saved = checkpoints(folder)
    if not saved:
        return "no checkpoint was saved, as no step was done yet"
    return f"{saved[-1]} is saved; continue with `halfbyte train {file} --resume`"
