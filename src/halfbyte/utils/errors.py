"""Errors that a user can act on. Each message names the faulty key, file, line or tensor, and the fix.

The command line prints a `HalfbyteError` as one message and exits with 1, or with 2 if the command line itself is
wrong. Any other exception is a bug, and its traceback is written to a file.
"""

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from . import text

_OS_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "your share of the disk is full",
    errno.EFBIG: "the file system takes no file of this size",
    errno.EROFS: "the disk can only be read",
    errno.ENOENT: "there is no such file",
    errno.EEXIST: "it exists already",
    errno.EACCES: "you may not read or enter it",
    errno.EPERM: "you may not do that",
    errno.EISDIR: "it is a folder",
    errno.ENOTDIR: "a part of its path is a file, not a folder",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "it is a link that leads back to itself",
    errno.ENOTEMPTY: "the folder is not empty",
    errno.EBUSY: "something else is using it",
    errno.EMFILE: "this process has too many files open",
    errno.ENFILE: "this machine has too many files open",
    errno.EIO: "the disk does not answer properly",
    errno.ESTALE: "its network folder is gone",
    errno.ENXIO: "nothing is at the other end of it",
}


class HalfbyteError(Exception):
    """Base of all errors with a known cause.

    Args:
        message: what is wrong, naming the key, file, line or tensor. Control characters are escaped and long lines cut.
        fix: what to do about it, as an imperative sentence; empty if the message says it.
    """

    def __init__(self, message: str, fix: str = ""):
        self.message, self.fix = text.message(message), text.message(fix)
        super().__init__(f"{self.message}\n  fix: {self.fix}" if fix else self.message)

    def __reduce__(self) -> tuple[Any, ...]:  # for pickling, from another process
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
def attribute_to_key(key: str) -> Iterator[None]:
    """Prefix the messages of errors raised within the context with `key`, unless they start with it."""
    try:
        yield
    except HalfbyteError as error:
        if error.message.startswith(key):
            raise
        raise type(error)(f"{key}: {error.message}", error.fix) from error


def first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's class name if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def explain_os_error(error: OSError) -> str:
    """Explain an OSError in plain words: "the disk is full", "you may not read or enter it", "it is a folder"."""
    return _OS_ERRORS.get(error.errno or 0) or (error.strerror or str(error) or type(error).__name__)
