"""`python -m bitsandbytes`: print the environment. There is no compiled library to look for."""

from __future__ import annotations

import contextlib
import sys

from ...cli import main as command_line


def main() -> None:
    """Print `halfbyte env`."""
    sys.argv = ["halfbyte", "env"]
    with contextlib.suppress(SystemExit):  # the end of the command
        command_line()


show_environment = main
