"""The command line: `halfbyte COMMAND`. See `halfbyte --help`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence

from .app import app

__all__ = ["app", "main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: without the program's name; default: those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    rest = [argument for argument in given if argument != "--debug"]
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    # Names that transformers will rename concern this package, not its user.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    app(["--debug", *rest] if len(rest) < len(given) else rest, prog_name="halfbyte")
