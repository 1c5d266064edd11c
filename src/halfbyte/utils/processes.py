"""Who a process is, written down so that another one can tell later whether it still runs.

A number alone does not say: it is given again after a reboot, in another container, on another machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process.

    Attributes:
        machine: 8 hex digits, of the host's name and of the space its process numbers are from.
        pid: its number there.
        since: when it began, in a unit of the machine's own that setting the clock does not change.
    """

    machine: str
    pid: int
    since: int

    @classmethod
    def this(cls) -> Process:
        return cls.here(os.getpid())

    @classmethod
    def here(cls, pid: int) -> Process:
        """That of this number on this machine."""
        return cls(_machine(), pid, _since(pid) or 0)

    @property
    def runs(self) -> bool | None:
        """Whether it does; None where that cannot be known, as it is another machine's."""
        return _since(self.pid) == self.since if self.machine == _machine() else None


@functools.cache
def _machine() -> str:
    namespace = Path("/proc/self/ns/pid")  # a container's own
    named = f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"
    return hashlib.sha256(named.encode()).hexdigest()[:8]


def _since(pid: int) -> int | None:
    """Ticks between the machine's start and that of a process (Unix seconds without /proc); None: it has ended."""
    if Path("/proc/self/stat").is_file():
        try:
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return None
        return None if state in "ZX" else int(rest[18])  # a zombie has ended; its parent has yet to notice
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.create_time())
    except psutil.NoSuchProcess:
        return None


LAUNCHER = "HALFBYTE_LAUNCHER"  # in the environment of a process that `halfbyte train` has started: its number


def was_launched() -> bool:
    """Whether torchrun, or what stands for it, has started this process beside others."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def was_restarted() -> bool:
    """Whether it has done so again after a failure, so that a run is to resume."""
    return was_launched() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def end_with_launcher() -> None:
    """Let the system end this process when the one that launched it ends, however that is; Linux alone can."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)
