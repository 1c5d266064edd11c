"""The command line: `halfbyte COMMAND`. See `halfbyte --help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..utils.processes import end_with_launcher, was_launched
from ..utils.streams import configure_streams
from .app import app
from .startup import keep_bytecode

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: arguments without the program's name; default: `sys.argv`.
    """
    end_with_launcher()
    keep_bytecode()
    words = list(sys.argv[1:] if arguments is None else arguments)
    without_debug = [argument for argument in words if argument != "--debug"]
    configure_streams(everything=len(without_debug) < len(words))
    words = ["--debug", *without_debug] if len(without_debug) < len(words) else without_debug
    try:
        app(words, prog_name="halfbyte", obj=words)
    except SystemExit as stop:
        if stop.code and was_launched():
            _end_now(stop.code if isinstance(stop.code, int) else 1)
        raise


def _end_now(code: int) -> None:
    """Exit without torch's cleanup, which may block on other ranks that in turn block on this one."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
