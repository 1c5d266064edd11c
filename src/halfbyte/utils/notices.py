"""Notices: messages about fallbacks, renamed keys and automatic choices, logged once each with the reason."""

import contextlib
import logging
from collections.abc import Iterator

from . import text

logger = logging.getLogger("halfbyte")

_logged: dict[str, str] = {}
_muted = False


def notice(key: str, message: str) -> None:
    """Log `message` at WARNING if `key` is new in this process, and keep it for the report."""
    if key not in _logged and not _muted:
        _logged[key] = text.message(message)
        logger.warning(_logged[key])


def notices_so_far() -> dict[str, str]:
    """Return all notices logged so far, key → message, in order."""
    return dict(_logged)


def reset_notices() -> None:
    """Clear the notices, for a new run in the same process and for tests."""
    _logged.clear()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Within the context, notices are neither logged nor kept: for reading back what was just written."""
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before
