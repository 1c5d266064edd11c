"""Notices: messages about fallbacks, renamed keys and automatic choices, logged once each with the reason.

A `notice` is logged at WARNING. A `remark` is about what halfbyte always does in such a case; it is logged at INFO, so
that it is printed with `--verbose` only. Reports list both.
"""

import contextlib
import logging
from collections.abc import Iterator

from . import text

logger = logging.getLogger("halfbyte")

_logged: dict[str, str] = {}
_muted = False


def notice(key: str, message: str) -> None:
    """Log `message` at WARNING if `key` is new in this process, and keep it for the report."""
    _log(logging.WARNING, key, message)


def remark(key: str, message: str) -> None:
    """Log `message` at INFO if `key` is new in this process, and keep it for the report."""
    _log(logging.INFO, key, message)


def _log(level: int, key: str, message: str) -> None:
    if key not in _logged and not _muted:
        _logged[key] = text.message(message)
        logger.log(level, _logged[key])


def print_remarks() -> None:
    """Print remarks as well from now on."""
    logger.setLevel(logging.INFO)


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
    was_muted, _muted = _muted, True
    try:
        yield
    finally:
        _muted = was_muted
