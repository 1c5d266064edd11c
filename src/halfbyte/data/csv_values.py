"""Values of CSV files, which have nothing but text: labels, numbers and lists where a column's part wants one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from ..reading import parse_json
from ..utils.errors import DataError
from ..utils.text import brief
from .sources import Source

# pandas writes 1.0 where labels are floats.
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
LISTS = ("messages", "completions", "labels")


def with_values(source: Source, columns: Mapping[str, str], numbers: Collection[str] = ()) -> Source:
    """Parse the text in those columns of a CSV file whose part is no text; other sources stay as they are.

    Args:
        columns: part to the column that plays it.
        numbers: further columns that hold numbers.

    Raises:
        DataError: a label is neither true nor false, or a list is no JSON; file, row and column are named.
    """
    if source.kind != "csv":
        return source
    rows = []
    for index, row in enumerate(source.rows):
        parsed = {column: _parsed(part, row[column], column, source.where(index)) for part, column in columns.items()}
        parsed |= {column: _number(row[column]) for column in numbers if column in row}
        rows.append({**row, **parsed})
    return replace(source, rows=rows)


def _parsed(part: str, text: Any, column: str, where: str) -> Any:
    if part == "label":
        return _truth(text, column, where)
    if part == "margin":
        return _number(text)
    if part not in LISTS:
        return text
    values = parse_json(text, f"{where}, column {column!r}", DataError, "write the list as JSON")
    if part == "labels" and isinstance(values, list):
        return [each if isinstance(each, bool) else _truth(str(each), column, where) for each in values]
    return values


def _truth(text: str, column: str, where: str) -> bool:
    found = TRUTHS.get(text.strip().casefold())
    if found is None:
        wrong = f"{where}: column {column!r} holds {brief(text)}, not true or false"
        raise DataError(wrong, "write true (or 1) for a good answer or step and false (or 0) for another")
    return found


def _number(text: str) -> float | str:
    """The number that a text writes; another text stays, and is refused where its number is asked for."""
    with contextlib.suppress(ValueError):
        return float(text)
    return text
