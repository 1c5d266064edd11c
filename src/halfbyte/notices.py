"""Say it once: fallbacks, renamed keys and automatic choices are announced with their reason, one time each."""

import logging

logger = logging.getLogger("halfbyte")

_said: dict[str, str] = {}


def notice(key: str, message: str) -> None:
    """Log `message` at WARNING the first time `key` is seen in this process, and remember it for the report."""
    if key not in _said:
        _said[key] = message
        logger.warning(message)


def said() -> dict[str, str]:
    """Everything announced so far, key → message, in order."""
    return dict(_said)


def forget() -> None:
    """Forget what was said (a new run in the same process; tests)."""
    _said.clear()
