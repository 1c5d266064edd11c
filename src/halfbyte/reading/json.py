"""Bounded parser for external JSON: limits depth, digits of numbers, and characters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..utils.errors import ConfigError, HalfbyteError
from .files import LARGEST_TEXT, read_text

DEEPEST = 100
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(
    path: Path | str, error: type[HalfbyteError] = ConfigError, fix: str = "", largest: int = LARGEST_TEXT
) -> Any:
    """Read a JSON file.

    Args:
        error: class of the error.
        fix: the fix for a missing or malformed file.
        largest: largest size in bytes.

    Raises:
        error: as `read_text` and `parse_json`, with the file and line.
    """
    return parse_json(read_text(path, error, fix, largest), str(path), error, fix)


def parse_json(
    text: str | bytes,
    source: str,
    error: type[HalfbyteError] = ConfigError,
    fix: str = "",
    *,
    line: int | None = None,
    unique: bool = False,
) -> Any:
    """Parse JSON text.

    Args:
        where: file or other source of `text`, for the error.
        line: line number in that file, if `text` is one line of it.
        unique: refuse duplicate keys in an object; else the last one wins.

    Raises:
        error: not JSON, nested too deeply, or an invalid number or character.
    """
    position = f"{source}:{line}" if line else source
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique) if unique else json.loads(text)
        if _nests(text, value):
            raise RecursionError
        if _HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as problem:
        problem_text = f"malformed JSON: {problem.msg} (column {problem.colno})"
        raise error(f"{position if line else f'{source}:{problem.lineno}'}: {problem_text}", fix) from None
    except RecursionError:
        raise error(f"{position}: nested more than {DEEPEST} levels deep", fix) from None
    except UnicodeDecodeError as problem:
        raise error(f"{position}: byte {problem.start + 1} is not UTF-8", fix or "save it as UTF-8") from None
    except UnicodeEncodeError as problem:
        half = problem.object[problem.start]
        raise error(f"{position}: half a surrogate pair ({half!r}) is no character", fix) from None
    except _DuplicateKey as problem:
        raise error(f"{position}: the key {problem} is given twice in one object", fix or "keep one of them") from None
    except ValueError:  # int() of more digits than Python reads
        raise error(f"{position}: a number has more digits than can be read", fix) from None


class _DuplicateKey(Exception):
    """Raised for a duplicate key."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object and refuse duplicate keys."""
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(repr(next(key for key in unique_pairs if keys.count(key) > 1)))
    return unique_pairs


def _nests(text: str, value: Any) -> bool:
    """Return whether `value`, parsed from `text`, is nested more than DEEPEST levels deep."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return False
    level = [value]
    for _ in range(DEEPEST + 1):
        nested = [node for node in level if isinstance(node, list | dict)]
        level = [child for node in nested for child in (node.values() if isinstance(node, dict) else node)]
        if not nested:
            return False
    return True
