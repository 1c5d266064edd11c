"""`python -m bitsandbytes`: print the environment. There is no compiled library to look for."""

from __future__ import annotations

import sys

from ...cli import main as command_line


def main() -> None:
    """Print `halfbyte env`, and exit."""
    sys.argv = ["halfbyte", "env"]
    command_line()


show_environment = main
