"""Outcome for a key of another tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..utils.text import brief


@dataclass(frozen=True)
class Mapped:
    """The key has an equivalent: our keys and their values."""

    keys: dict[str, Any]


@dataclass(frozen=True)
class Ignored:
    """The key has no effect here; `why` is empty if no notice is needed."""

    why: str


@dataclass(frozen=True)
class Refused:
    """The key has no equivalent: the reason, and what to do instead."""

    why: str
    fix: str


Outcome = Mapped | Ignored | Refused
Values = dict[str, Any]
Converter = Callable[[Any, Values], Outcome]  # a key's value, and all keys of its file


def is_off(value: Any) -> bool:
    """Return whether a value switches its key off, so that ignoring the key changes nothing."""
    return value in (None, False, "", 0, "none", [], {})


def one_of(same: tuple[Any, ...], why: str, fix: str) -> Converter:
    """Make a converter that ignores the values in `same` and refuses all others."""
    return lambda value, _: Ignored("") if value in same else Refused(f"{why}: {brief(value)}", fix)


def as_list(value: Any) -> list[Any]:
    """Return a list, or the parts of comma-separated text."""
    return value if isinstance(value, list) else [name.strip() for name in str(value).split(",") if name.strip()]


def when_on(**keys: Any) -> Converter:
    """Make a converter of a switch that gives `keys` if it is on."""
    return lambda value, _: Mapped(dict(keys)) if value else Ignored("")


def only_with(key: str) -> Converter:
    """Make a converter of a key that the converter of `key` reads."""
    return lambda _, values: Ignored("" if values.get(key) else f"it has a meaning only with {key}")


def choice(key: str, keys_of: Mapping[Any, Values], fix: str) -> Converter:
    """Make a converter of a key with named values.

    Args:
        keys_of: value → our keys; without keys, the value is ignored.
        fix: for any other value.
    """

    def convert(value: Any, values: Values) -> Outcome:
        if value not in keys_of:
            return Refused(f"{key}: {value} has no equivalent", fix)
        return Mapped(dict(keys_of[value])) if keys_of[value] else Ignored("")

    return convert
