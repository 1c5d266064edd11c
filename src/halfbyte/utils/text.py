"""Formatting of bytes, times, values and outside text in messages: short, on one line, without terminal commands."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Any

LONGEST_LINE = 800
# Characters that a terminal executes or cannot print: controls, lone surrogates, changes of the reading direction.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4


def visible(text: str) -> str:
    r"""Escape the control characters in `text` (`\\x1b`), except newlines and tabs."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)


def json_line(value: Any) -> str:
    r"""Return `value` as JSON on one line, with control characters escaped as JSON does (`\\u007f`)."""
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))


def one_line(text: str) -> str:
    """Escape control characters, newlines and tabs in `text`, for a path within a line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def brief(value: Any, longest: int = 120) -> str:
    """Return `repr(value)` in at most `longest` characters, at a cost independent of the value's size."""
    try:
        return cut(visible(_SHORT.repr(value)), longest)
    except ValueError:  # an integer with more digits than Python converts
        return f"a {type(value).__name__} that is too long to show"


def cut(line: str, longest: int = LONGEST_LINE) -> str:
    """Replace the middle of a `line` longer than `longest` characters by an ellipsis."""
    if len(line) <= longest:
        return line
    end = longest // 3
    return f"{line[: longest - end - 3]}...{line[-end:]}"


def message(text: str) -> str:
    """Cut and escape every line of `text` for an error message."""
    return "\n".join(cut(visible(line)) for line in text.split("\n"))


def counts(numbers: Mapping[str, int]) -> str:
    """Join counts by name into one line: "14 Q4_0, 2 Q6_K"."""
    return ", ".join(f"{count} {name}" for name, count in numbers.items()) or "none"


def size(count: float | None) -> str:
    """Format bytes: '6.2 GiB', '512 MiB', '3 KiB'; '–' if unknown."""
    if count is None:
        return "–"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor:
            value = count / factor
            return f"{value:.1f} {unit}" if abs(value) < 100 else f"{value:,.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Format seconds: '8.2 s', '3:07 min', '2:03:07 h'; '–' if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d} h" if hours else f"{minutes}:{remainder:02d} min"
