"""Lock of a run's folder: a locked file that names its process, so that one run at a time writes into the folder.

The operating system holds the lock (fcntl): it ends with its process, and child processes do not inherit it.
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

from ..reading import parse_json
from ..utils.errors import ConfigError
from ..utils.files import remove_unused_folders, write_problem
from ..utils.notices import notice
from ..utils.processes import Process
from .layout import LOCK

HELD = (errno.EACCES, errno.EAGAIN)
_held_here: set[Path] = set()  # folders that this process holds: fcntl would grant them a second time


class _Holder(NamedTuple):
    """The process that holds a folder."""

    host: str
    process: Process

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.host}"


@contextlib.contextmanager
def run_lock(output: Path) -> Iterator[None]:
    """Lock `output` for one run; creates the folder, and removes it after a run that wrote nothing.

    Raises:
        ConfigError: another run is writing into it, or it cannot be created or written.
    """
    with remove_unused_folders(output):
        try:
            output.mkdir(parents=True, exist_ok=True)
            descriptor = _open_locked(output / LOCK)
        except OSError as error:
            message, fix = write_problem(error.filename or output, error)
            raise ConfigError(f"output_dir: {message}", fix) from error
        folder = output.resolve()
        _held_here.add(folder)
        try:
            yield
        finally:
            _held_here.discard(folder)
            with contextlib.suppress(OSError):
                (output / LOCK).unlink()
            os.close(descriptor)


def check_free(output: Path) -> None:
    """Check that no run is writing into `output`, without changing anything.

    Raises:
        ConfigError: the process of the run that is.
    """
    path = output / LOCK
    if output.resolve() in _held_here:  # opening and closing it would release the lock
        raise ConfigError(*_refusal(path, _this_one()))
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # missing or not writable, which the run itself reports
        return
    try:
        holder = _holder(descriptor)
        if not _lock(descriptor, path) and holder and holder.process.is_running is not False:
            raise ConfigError(*_refusal(path, str(holder), f"; remove {path} if that process has ended"))
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    """Open and lock the lock file, and write this process's name into it.

    Raises:
        ConfigError: another process holds it, or may hold it on a file system without locks.
    """
    if path.parent.resolve() in _held_here:
        raise ConfigError(*_refusal(path, _this_one()))
    descriptor, is_locked_here = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), False
    try:
        locked, holder = _lock(descriptor, path), _holder(descriptor)
        if holder and not locked and holder.process.is_running is not False:
            raise ConfigError(*_refusal(path, str(holder), f"; remove {path} if that process has ended"))
        is_locked_here = True
        os.ftruncate(descriptor, 0)
        named = {"host": socket.gethostname(), **Process.current()._asdict()}
        os.pwrite(descriptor, json.dumps(named).encode(), 0)
        if _is_still(descriptor, path):
            if holder:
                problem = f"{holder} was writing into {path.parent} and ended without releasing it"
                notice(f"lock {path}", f"{problem}; this run takes over")
            return descriptor
    except BaseException:
        if is_locked_here:
            path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    os.close(descriptor)  # the holder removed the file between open and lock
    return _open_locked(path)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file; returns False, with a notice, if the file system has no locks.

    Raises:
        ConfigError: another process holds it.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            holder = _holder(descriptor)
            raise ConfigError(*_refusal(path, str(holder or "another process"))) from None
        problem = f"the file system of {path.parent} has no locks ({error.strerror})"
        notice("no-locks", f"{problem}: only the process named in {path.name} protects the folder from a second run")
        return False
    return True


def _refusal(path: Path, holder: str, hint: str = "") -> tuple[str, str]:
    """Message and fix for a folder in use."""
    fix = f"wait until it has ended, or choose another output_dir{hint}"
    return f"output_dir: {holder} is writing into {path.parent}", fix


def _this_one() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}, this one,"


def _is_still(descriptor: int, path: Path) -> bool:
    """Return whether `path` is still the open file, and not a new one after its holder removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> _Holder | None:
    """The process named in the lock file."""
    try:
        named = parse_json(os.pread(descriptor, 4096, 0), LOCK)
        return _Holder(str(named["host"]), Process(named["machine"], int(named["pid"]), int(named["since"])))
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        return None
