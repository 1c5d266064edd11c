"""Values and text from outside, as a message may show them: short, on one line, and without a terminal's commands."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

LONGEST_LINE = 800
# What a terminal obeys or cannot print: control characters, half surrogate pairs, reversals of the reading direction.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 80, 80, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 4


def visible(text: str) -> str:
    """`text` with control characters spelled out (`\\x1b`); newlines and tabs stay."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def json_line(value: Any) -> str:
    """`value` as JSON on one line, control characters escaped as JSON has them (`\\u007f`)."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def one_line(text: str) -> str:
    """`text` as `visible` shows it, newlines and tabs spelled out, too: for a path within a line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def brief(value: Any, longest: int = 120) -> str:
    """`repr(value)` in at most `longest` characters, whose cost does not grow with the value."""
    try:
        return cut(visible(_SHORT.repr(value)), longest)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} that is too long to show"


def cut(line: str, longest: int = LONGEST_LINE) -> str:
    """`line`, its middle left out where it is longer than `longest` characters."""
    if len(line) <= longest:
        return line
    end = longest // 3
    return f"{line[: longest - end - 3]}...{line[-end:]}"


def message(text: str) -> str:
    """`text`, a few lines, as an error may hold it: every line cut, and no terminal's commands in it."""
    return "\n".join(cut(visible(line)) for line in text.split("\n"))


def counts(numbers: Mapping[str, int]) -> str:
    """Join counts by name into one line: "14 Q4_0, 2 Q6_K"."""
    return ", ".join(f"{count} {name}" for name, count in numbers.items()) or "none"
