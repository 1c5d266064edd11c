"""Say it once: fallbacks, renamed keys and automatic choices are announced with their reason, one time each."""

import contextlib
import logging
from collections.abc import Iterator

from . import text

logger = logging.getLogger("halfbyte")

_said: dict[str, str] = {}
_silent = False


def notice(key: str, message: str) -> None:
    """Log `message` at WARNING the first time `key` is seen in this process, and remember it for the report."""
    if key not in _said and not _silent:
        _said[key] = text.message(message)
        logger.warning(_said[key])


def notices_so_far() -> dict[str, str]:
    """Everything announced so far, key → message, in order."""
    return dict(_said)


def reset_notices() -> None:
    """Forget what was said (a new run in the same process; tests)."""
    _said.clear()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Within it nothing is announced or remembered: for reading back what was just written, which is no news."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before
