"""Conversion of other libraries' exceptions, raised while they read external input, into halfbyte's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..utils.errors import CheckpointError, HalfbyteError
from ..utils.hardware import is_out_of_memory

LONGEST = 300  # characters of a library's message


@contextlib.contextmanager
def answered(message: str, fix: str = "", error: type[HalfbyteError] = CheckpointError) -> Iterator[None]:
    """Convert a library's exception inside to `error("message: its text", fix)`.

    Errors of halfbyte and out-of-memory errors pass unchanged.
    """
    try:
        yield
    except HalfbyteError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        raise error(f"{message}: {text_of(problem)}", fix) from problem


def text_of(problem: Exception) -> str:
    """Return the text of another library's exception, on one line of at most `LONGEST` characters."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    if isinstance(problem, KeyError) and " " not in text:  # only the key
        text = f"there is no {text}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
