"""Columns and keys of rows that are neither trained nor shown, with how many rows have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..utils.notices import notice
from ..utils.text import brief
from .formats import MARKS, MESSAGE_KEYS, ROLES
from .sources import Row, Source

SPOKEN = ("messages", "prompt", "completion", "chosen", "rejected")  # parts that may hold turns
BESIDE = ("context", "input", "history")  # parts that are shown with a prompt that is a text
CALL_KEYS, FUNCTION_KEYS = {"id", "type", "function", "name", "arguments"}, {"name", "arguments"}
EMPTY: tuple[Any, ...] = (None, "", [], {})
MOST_NAMED = 20


def leftovers(source: Source, columns: Mapping[str, str], further: Collection[str] | None = ()) -> Counter[str]:
    """Count the rows of `source` with a value in each column, and in each key of turns, that nothing reads.

    A key of turns is written `column[].key`.

    Args:
        columns: part to the column that plays it.
        further: columns that are read otherwise; None: all of them are.
    """
    read = {*columns.values(), *(further or ())}
    spoken = [columns[part] for part in SPOKEN if part in columns]
    found: Counter[str] = Counter()
    for row in source.rows:
        names = {name for name, value in row.items() if name not in read and value not in EMPTY}
        names = set() if further is None else names
        for column in spoken:
            names |= {f"{column}[].{key}" for turn in _turns(row, column) for key in _unread_keys(turn)}
        found.update(names | _shadowed(row, columns))
    return found


def _turns(row: Row, column: str) -> list[dict[str, Any]]:
    value = row.get(column)
    several = value if isinstance(value, list) else [value]  # LLaMA-Factory has one turn alone
    return [turn for turn in several if isinstance(turn, dict)]


def _unread_keys(turn: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a turn that become no part of its message."""
    read = {"role" if "role" in turn else "from", "content" if "content" in turn else "value", *MESSAGE_KEYS, *MARKS}
    yield from (key for key, value in turn.items() if key not in read and value not in EMPTY)
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        for read_here, place, value in ((CALL_KEYS, "", call), (FUNCTION_KEYS, "function.", _function(call))):
            yield from (f"tool_calls[].{place}{key}" for key in value if key not in read_here)


def _function(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _shadowed(row: Row, columns: Mapping[str, str]) -> set[str]:
    """Columns that a row's turns take the place of: a system text by another one, and by whole conversations a prompt
    that is not in them and what would stand with it."""
    turns = [turn for part in SPOKEN if part in columns for turn in _turns(row, columns[part])]
    said = {text.strip() for turn in turns if isinstance(text := turn.get("content", turn.get("value")), str)}
    found = set()
    system, prompt = columns.get("system", ""), columns.get("prompt", "")
    if any(_role(turn) == "system" for turn in turns[:1]) and row.get(system):
        found |= {system} if str(row[system]).strip() not in said else set()
    beside = {columns[part] for part in BESIDE if row.get(columns.get(part, ""))}
    if isinstance(row.get(prompt), list):
        found |= beside
    elif isinstance(row.get(prompt), str) and any(_role(turn) != "assistant" for turn in turns[:1]):
        found |= beside | ({prompt} if row[prompt].strip() not in said else set())
    return found


def _role(turn: Mapping[str, Any]) -> str | None:
    return ROLES.get(str(turn.get("role", turn.get("from"))))


def say_leftovers(names: str | Sequence[str], found: Mapping[str, int]) -> None:
    """Name in one notice what is left out of the rows of a dataset."""
    if not found:
        return
    dataset = names if isinstance(names, str) else ", ".join(names)
    counts = sorted(found.items(), key=lambda each: -each[1])
    said = ", ".join(f"{brief(name)} ({count:,} row{'s' * (count > 1)})" for name, count in counts[:MOST_NAMED])
    more = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
    notice(
        f"left-out:{dataset}",
        f"{dataset}: neither trained nor shown are {said}{more}; name a column's part with column_mapping to use it",
    )
