"""`halfbyte check`: all that `halfbyte train` does before its first step, without a file written."""

from __future__ import annotations

from rich.text import Text

from ..config import RunConfig
from ..console import Console
from ..train.look_over import look_over_run
from .imports import quick_imports


def check_run(config: RunConfig) -> None:
    """Print what a run would use and do.

    Raises:
        HalfbyteError: what `halfbyte train` would raise before its first step.
    """
    look_over_run(config)
    with quick_imports():
        from ..parallel.launch import layout_wanted
        from ..train.prepare import prepare_run

    console = Console()
    layout_wanted(config)
    prepare_run(config, console=console)
    console.print(Text.assemble(("ready:", "green"), " `halfbyte train` can start"))
