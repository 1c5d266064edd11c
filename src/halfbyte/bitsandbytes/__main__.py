"""Run a script or module with `bitsandbytes` answered by halfbyte: `python -m halfbyte.bitsandbytes SCRIPT|-m MODULE`.

Without arguments, print `halfbyte env`.
"""

from __future__ import annotations

import os
import runpy
import sys

from . import install


def main(arguments: list[str]) -> None:
    """Call `install` and run the script or module of the arguments, as `python` runs it."""
    if not arguments:
        from .diagnostics.main import main as print_environment

        print_environment()
        return
    install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.exit("usage: python -m halfbyte.bitsandbytes SCRIPT|-m MODULE [ARGUMENTS]")
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
