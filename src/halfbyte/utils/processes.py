"""Processes and signals: identity of a process across restarts and machines, its launcher, and requests to stop.

A PID alone does not identify a process: it is reused after a reboot, in another container, or on another machine.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple


class Process(NamedTuple):
    """Identity of a process.

    Attributes:
        machine: 8 hex digits, a hash of the host name and the PID namespace.
        pid: process ID.
        since: start time, in a unit of the machine that is independent of the clock.
    """

    machine: str
    pid: int
    since: int

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        return cls.of_pid(os.getpid())

    @classmethod
    def of_pid(cls, pid: int) -> Process:
        """Return the identity of a process on this machine."""
        return cls(_machine(), pid, _start_time(pid) or 0)

    @property
    def is_running(self) -> bool | None:
        """Whether the process is running; None if unknown, since it belongs to another machine."""
        return _start_time(self.pid) == self.since if self.machine == _machine() else None

    def send_signal(self, number: int) -> None:
        """Send a signal to this process, and to no later one with its PID.

        Raises:
            ProcessLookupError: it has ended, or belongs to another machine.
            PermissionError: it belongs to another user.
        """
        descriptor = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
        try:
            if not self.is_running:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            if descriptor is None:
                os.kill(self.pid, number)
            else:  # still this process, even if it ends now and its PID is used again
                signal.pidfd_send_signal(descriptor, number)
        finally:
            if descriptor is not None:
                os.close(descriptor)


@functools.cache
def _machine() -> str:
    namespace = Path("/proc/self/ns/pid")  # differs between containers
    identity = f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"
    return hashlib.sha256(identity.encode()).hexdigest()[:8]


def _start_time(pid: int) -> int | None:
    """Return the ticks from boot to a process's start (Unix seconds without /proc), or None if it has ended."""
    if Path("/proc/self/stat").is_file():
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        return None if state in "ZX" else int(fields[18])  # a zombie has ended, but its parent has not reaped it
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.NoSuchProcess:
        return None


# --- launcher ---------------------------------------------------------------------------------------------------------

LAUNCHER = "HALFBYTE_LAUNCHER"  # environment variable: PID of the `halfbyte train` that started this process


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank, the only one included."""
    return "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def is_main_rank() -> bool:
    """Return whether this process is rank 0 or the only process."""
    return os.environ.get("RANK", "0") == "0"


def was_launched() -> bool:
    """Return whether torchrun or another launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def was_restarted() -> bool:
    """Return whether the launcher restarted this process after a failure, so that the run is to resume."""
    return was_launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def end_with_launcher() -> None:
    """Have Linux kill this process when its launcher ends for any reason; no effect on other systems."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher has ended already
        os.kill(os.getpid(), signal.SIGKILL)


# --- signals ----------------------------------------------------------------------------------------------------------

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal ends the command, like Ctrl-C.

    Args:
        number: of the signal; the command's exit code is 128 more.
        saved: message for the user about what is saved and how to continue; may be empty.
    """

    def __init__(self, number: int, saved: str = ""):
        super().__init__(saved)
        self.number = signal.Signals(number)


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Within the context, SIGTERM and SIGHUP raise `Stopped`, so that cleanup runs.

    A second signal ends the process as usual. Signals that are ignored (nohup) or have a handler are left alone.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    with _handled(dict.fromkeys(TERMINATION_SIGNALS, handle)):
        yield


class StopRequest:
    """Request to stop: the signal's number (0: none) and the time since it arrived."""

    number, since = 0, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since if self.number else 0.0


_requests: list[StopRequest] = []  # of the open context, if any


@contextlib.contextmanager
def request_on_signals(notify: Callable[[int], None]) -> Iterator[StopRequest]:
    """Within the context, the first SIGTERM, SIGHUP or Ctrl-C only sets the `StopRequest`, which the caller polls.

    A second signal raises `Stopped`, and a third ends the process. Ignored or handled signals are left alone.

    A context inside of another one has the request of the outer one, so that several runs of a process stop together.

    Args:
        notify: called with the first signal, within its handler.
    """
    if _requests:
        yield _requests[-1]
        return
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        if request.number:
            signal.signal(number, signal.SIG_DFL)
            raise Stopped(number)
        request.number, request.since = number, time.monotonic()
        notify(number)

    with _handled(dict.fromkeys((*TERMINATION_SIGNALS, signal.SIGINT), ask)):
        _requests.append(request)
        try:
            yield request
        finally:
            _requests.remove(request)


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Install `handlers` in this process for signals with the default handler, Python's, or one of ours."""
    owner = os.getpid()
    previous: dict[signal.Signals, Any] = {}

    def wrapped(handler: Callable[[int, FrameType | None], None]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() == owner:
                return handler(number, frame)
            signal.signal(number, signal.SIG_DFL)  # a forked worker dies at once
            os.kill(os.getpid(), number)

        handle.halfbyte = True  # type: ignore[attr-defined]
        return handle

    if threading.current_thread() is threading.main_thread():  # Python allows handlers in the main thread only
        for sign, handler in handlers.items():
            now = signal.getsignal(sign)
            if now in (signal.SIG_DFL, signal.default_int_handler) or hasattr(now, "halfbyte"):
                previous[sign] = signal.signal(sign, wrapped(handler))
    try:
        yield
    finally:
        for sign, handler in previous.items():
            signal.signal(sign, handler)
