"""The errors a user can act on. Each message names the thing at fault (key, file, line, tensor) and the fix.

The command line prints a `HalfbyteError` as one message and exits with 1, or with 2 where the command line itself is
wrong. Any other exception is a bug: its traceback goes into a file.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from . import text


class HalfbyteError(Exception):
    """Base of all errors with a known cause.

    Args:
        message: what is wrong, naming the key, file, line or tensor. Control characters are spelled out, and
            long lines cut.
        fix: what to do about it, as an imperative sentence; empty when the message already says it.
    """

    def __init__(self, message: str, fix: str = ""):
        self.message, self.fix = text.message(message), text.message(fix)
        super().__init__(f"{self.message}\n  fix: {self.fix}" if fix else self.message)

    def __reduce__(self) -> tuple[Any, ...]:  # for the way back from another process
        return type(self), (self.message, self.fix)


class ConfigError(HalfbyteError):
    """A configuration key or value is wrong."""


class UsageError(ConfigError):
    """The command line itself is wrong: an argument is missing, an option or its value is unknown."""


class DataError(HalfbyteError):
    """A dataset is missing, malformed or leaves nothing to train on."""


class CheckpointError(HalfbyteError):
    """A file of weights is missing, truncated, misshapen or made for something else."""


class ModelError(HalfbyteError):
    """The model, tokenizer or a target module is not what the request needs."""


class TrainingError(HalfbyteError):
    """Training had to stop: NaN/Inf, no trained tokens, out of memory, no space left."""


@contextlib.contextmanager
def of_key(key: str) -> Iterator[None]:
    """What is wrong inside is said of `key`, where it is not said of it already."""
    try:
        yield
    except HalfbyteError as error:
        if error.message.startswith(key):
            raise
        raise type(error)(f"{key}: {error.message}", error.fix) from error
