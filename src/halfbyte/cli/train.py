"""`halfbyte train`."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from ..config import RunConfig
from ..runs.inputs import look_over_inputs
from ..runs.lock import run_lock
from ..train.checkpoint import starting_point
from .imports import quick_imports


def train_run(config: RunConfig, file: Path, resume: bool) -> None:
    """Train, and on Ctrl-C say what is saved and how to go on."""
    again: str | bool | None = True if resume else config.resume_from_checkpoint
    with run_lock(config.output_path):
        starting_point(config, again, contents=False)
    look_over_inputs(config)
    with quick_imports():
        from ..train.sft import train

    try:
        train(config, resume=again, console=Console())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_saved(config.output_path, file)) from None


def _what_is_saved(folder: Path, file: Path) -> str:
    names = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")]
    steps = [int(found[1]) for found in names if found]
    if not steps:
        return "no checkpoint was saved yet (save_steps sets how often one is)"
    return f"{folder}/checkpoint-{max(steps)} is saved; continue with `halfbyte train {file} --resume`"
