"""Around other libraries while they read what comes from outside: what they raise becomes one of halfbyte's errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..utils.errors import CheckpointError, HalfbyteError
from ..utils.hardware import is_out_of_memory

LONGEST = 300  # characters of a library's words


@contextlib.contextmanager
def answered(message: str, fix: str = "", error: type[HalfbyteError] = CheckpointError) -> Iterator[None]:
    """Whatever a library raises inside becomes `error(message: its words, fix)`; errors of halfbyte stay as they are.

    So does running out of memory, which says nothing about what was read.
    """
    try:
        yield
    except HalfbyteError:
        raise
    except Exception as problem:
        if is_out_of_memory(problem):
            raise
        raise error(f"{message}: {in_words(problem)}", fix) from problem


def in_words(problem: Exception) -> str:
    """What an exception of another library says, on one line and not too long."""
    said = " ".join(str(problem).split()) or type(problem).__name__
    if isinstance(problem, KeyError) and " " not in said:  # the bare key
        said = f"nothing is called {said}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}…"
