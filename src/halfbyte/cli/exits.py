"""What stops a command becomes one message on stderr and an exit code.

0: done. 2: a `HalfbyteError`, or wrong usage. 130: Ctrl-C. Anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import HalfbyteError

FAILED, INTERRUPTED = 2, 130


class Commands(TyperGroup):
    """The group of commands; with `--debug` nothing is caught."""

    def invoke(self, ctx: Any) -> Any:
        if ctx.params.get("debug"):
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except HalfbyteError as error:
            _print_error(error)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt as stop:
            typer.echo(f"\nstopped{f': {stop}' if str(stop) else ''}", err=True)
            raise typer.Exit(INTERRUPTED) from None


def _print_error(error: HalfbyteError) -> None:
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble(("error: ", "bold red"), error.message)
    if error.fix:
        message.append("\n  fix: ", "bold green").append(error.fix)
    Console(stderr=True, soft_wrap=True).print(message)
