"""Options of an optimizer: the names, types, defaults and limits that its row declares for `optim_args`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str
TRUE, FALSE = ("true", "yes"), ("false", "no")


@dataclass(frozen=True)
class Option:
    """One key of `optim_args`.

    Attributes:
        default: value of the option if it is not given; its type is the option's type. None: an optional integer.
        choices: allowed values; empty: any.
        above, least, most: limits of a number; `above` excludes its bound.
    """

    default: Value | None
    choices: tuple[Value, ...] = ()
    above: float | None = None
    least: float | None = None
    most: float | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether `value` has the option's type and is within its limits."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(self.default, bool) and isinstance(value, bool)
        if self.choices:
            return value in self.choices
        if not isinstance(value, int | float if isinstance(self.default, float) else int):
            return False
        above = self.above is None or value > self.above
        return above and (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def allowed(self) -> str:
        """Return the allowed values in words."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return " or ".join(map(str, self.choices))
        limits = (("above", self.above), ("from", self.least), ("to", self.most))
        number = "a number" if isinstance(self.default, float) else "a whole number"
        return " ".join([number, *(f"{word} {limit:g}" for word, limit in limits if limit is not None)])


def parse_options(text: str) -> dict[str, Value]:
    """Parse transformers' `key=value, key=value`; numbers, true and false become values, anything else stays text.

    Raises:
        ValueError: an entry is not `key=value`.
    """
    found: dict[str, Value] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key and equals and value):
            raise ValueError(entry)
        found[key] = _scalar(value)
    return found


def _scalar(text: str) -> Value:
    if text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def option_values(declared: Mapping[str, Option], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the value of every declared option, with numbers as floats where the default is one."""
    found: dict[str, Any] = {}
    for name, option in declared.items():
        value = (given or {}).get(name, option.default)
        found[name] = float(value) if isinstance(option.default, float) else value
    return found
