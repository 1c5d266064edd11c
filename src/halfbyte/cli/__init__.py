"""The command line: `halfbyte COMMAND`. See `halfbyte --help`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..streams import settle_streams
from .app import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: without the program's name; default: those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest = [argument for argument in given if argument != "--debug"]
    settle_streams(everything=len(rest) < len(given))
    app(["--debug", *rest] if len(rest) < len(given) else rest, prog_name="halfbyte")
