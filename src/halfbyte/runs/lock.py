"""One run at a time in a folder: a file that its process holds locked, with the process's name in it.

The lock is the system's (fcntl): it ends with its process, however that ends, and child processes do not inherit it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from halfbyte.reading import parse_json
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.files import new_folders, refusal
from halfbyte.utils.notices import notice
from halfbyte.utils.processes import Process

NAME = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)
_ours: set[Path] = set()  # what this process holds: fcntl would give it a second time


class _Holder(NamedTuple):
    """Who has a folder."""

    host: str
    process: Process

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.host}"


@contextlib.contextmanager
def run_lock(output: Path) -> Iterator[None]:
    """Hold `output` for one run; the folder is made where it is not there, and gone after a run that wrote nothing.

    Raises:
        ConfigError: another run is writing into it, or it cannot be made or written.
    """
    with new_folders(output):
        try:
            output.mkdir(parents=True, exist_ok=True)
            descriptor = _open_locked(output / NAME)
        except OSError as error:
            message, fix = refusal(error.filename or output, error)
            raise ConfigError(f"output_dir: {message}", fix) from error
        place = output.resolve()
        _ours.add(place)
        try:
            yield
        finally:
            _ours.discard(place)
            with contextlib.suppress(OSError):
                (output / NAME).unlink()
            os.close(descriptor)


def check_free(output: Path) -> None:
    """Whether no run is writing into `output`; nothing is made or changed.

    Raises:
        ConfigError: one is, and which.
    """
    path = output / NAME
    if output.resolve() in _ours:  # to open and close it would give the lock up
        raise ConfigError(*_refusal(path, _this_one()))
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # not there, or not to be written, which the run itself says
        return
    try:
        before = _holder(descriptor)
        if not _lock(descriptor, path) and before and before.process.runs is not False:
            raise ConfigError(*_refusal(path, str(before), f"; remove {path} if that process has ended"))
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    """A descriptor of the lock file, locked, with this process named in it.

    Raises:
        ConfigError: another process has it, or may have where the file system has no locks.
    """
    if path.parent.resolve() in _ours:
        raise ConfigError(*_refusal(path, _this_one()))
    descriptor, ours = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        locked, before = _lock(descriptor, path), _holder(descriptor)
        if before and not locked and before.process.runs is not False:
            raise ConfigError(*_refusal(path, str(before), f"; remove {path} if that process has ended"))
        ours = True
        os.ftruncate(descriptor, 0)
        named = {"host": socket.gethostname(), **Process.this()._asdict()}
        os.pwrite(descriptor, json.dumps(named).encode(), 0)
        if _is_still(descriptor, path):
            if before:
                what = f"{before} was writing into {path.parent} and did not end in order"
                notice(f"lock {path}", f"{what}; this run takes over")
            return descriptor
    except BaseException:
        if ours:
            path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    os.close(descriptor)  # its holder removed it while it was opened here
    return _open_locked(path)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file; False, with a notice, where the file system cannot.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            before = _holder(descriptor)
            raise ConfigError(*_refusal(path, str(before or "another process"))) from None
        said = f"the file system of {path.parent} has no locks ({error.strerror})"
        notice("no-locks", f"{said}: runs are kept apart by the name in {path.name} alone")
        return False
    return True


def _refusal(path: Path, holder: str, more: str = "") -> tuple[str, str]:
    """Message and fix."""
    fix = f"wait until it has ended, or choose another output_dir{more}"
    return f"output_dir: {holder} is writing into {path.parent}", fix


def _this_one() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, this one,"


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether `path` is the file that is open, and not one made after its holder had removed that."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> _Holder | None:
    """Who is named in the lock file."""
    try:
        named = parse_json(os.pread(descriptor, 4096, 0), NAME)
        return _Holder(str(named["host"]), Process(named["machine"], int(named["pid"]), int(named["since"])))
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        return None
