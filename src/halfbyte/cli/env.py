"""`halfbyte env`: the environment as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def print_environment() -> None:
    """Print what `halfbyte.environment.environment` finds, one line per fact."""
    from ..environment import environment

    table = Table.grid(padding=(0, 2))
    for key, value in environment().items():
        table.add_row(f"[bold]{key}[/]", _in_words(value))
    Console(soft_wrap=True).print(table)


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return " · ".join(f"{key} {_in_words(part)}" for key, part in value.items() if part not in (None, "", []))
    if isinstance(value, list):
        return "; ".join(_in_words(part) for part in value) or "none"
    return str(value)
