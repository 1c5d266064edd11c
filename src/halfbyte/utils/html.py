"""HTML of objects in notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .text import visible


def name_table(rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table of names and values, escaped."""
    cells = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f"<table><tbody>{cells}</tbody></table>"


def _text(value: object) -> str:
    return escape(visible(str(value)))
