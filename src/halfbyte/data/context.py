"""Columns that are shown together with a prompt: contexts, inputs and earlier turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..utils.notices import notice
from .sources import Source

# Columns that are shown with what a prompt's column asks, by part; the first one of each that there is.
BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "instruction": {"input": ("input", "query", "context")},
    "question": {"context": ("context",), "input": ("input",)},
    "query": {"context": ("context",), "input": ("input",)},
    "input": {"context": ("context",)},
}


def every_column(source: Source) -> list[str]:
    """The columns of all rows: an optional one may be missing in most of them."""
    return list(dict.fromkeys(column for row in source.rows for column in row))


def instructing(source: Source, columns: Mapping[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Find the columns of a system text and of tools: part to column.

    Beside a prompt that is a text, tools count where they look like tools, unless `mapped` names them.

    Args:
        columns: part to column, as recognised so far.
    """
    every = every_column(source)
    found = {part: mapped.get(part, part) for part in ("system", "tools") if mapped.get(part, part) in every}
    asking = columns.get("prompt", columns.get("instruction"))
    if asking is not None and isinstance(_first_value(source, asking), str) and "tools" not in mapped:
        found = {part: name for part, name in found.items() if part != "tools" or _is_tools(_first_value(source, name))}
    return found


def shown_beside(source: Source, columns: Mapping[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Find the columns that are shown together with a prompt: part (context, input, history) to column.

    A context stands before a question and behind an instruction, an input behind either. What a column named `prompt`
    asks is complete, unless `mapped` (of column_mapping) names more.

    Args:
        columns: part to column, as recognised so far.
    """
    asking = columns.get("prompt", columns.get("instruction"))
    if asking is None or not isinstance(_first_value(source, asking), str):
        return {}
    every, used = every_column(source), set(columns.values())
    found: dict[str, str] = {}
    for part, names in {"context": (), "input": (), "history": ("history",), **BESIDE.get(asking, {})}.items():
        if part in mapped:
            found[part] = mapped[part]
            continue
        fits = _is_history if part == "history" else _is_text
        free = (name for name in names if name in every and name not in used and part not in columns)
        if name := next((name for name in free if fits(_first_value(source, name))), ""):
            found[part] = name
            if part != "history":  # of which each row says so
                notice(f"columns:{source.path}:{part}", f"{source.path}: {name} is shown with what {asking} asks")
    return found


def _first_value(source: Source, column: str) -> Any:
    """The first value in a column that is not empty."""
    return next((row[column] for row in source.rows if row.get(column)), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tools(value: Any) -> bool:
    """Whether a value looks like a list of tools, or like its JSON."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and isinstance(value[0], dict)


def _is_history(value: Any) -> bool:
    """Whether a value looks like pairs of prompt and answer, or like these as JSON, which a CSV file has."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and isinstance(value[0], list)
