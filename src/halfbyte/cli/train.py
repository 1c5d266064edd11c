"""`halfbyte train`."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from ..config import RunConfig
from ..train.look_over import look_over_run


def train_run(config: RunConfig, file: Path, resume: bool) -> None:
    """Train, and on Ctrl-C say what is saved and how to go on."""
    again: str | bool | None = True if resume else config.resume_from_checkpoint
    look_over_run(config, again)
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
