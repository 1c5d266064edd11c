"""Who a process is, written down so that another one can tell later whether it still runs.

A number alone does not say: it is given again after a reboot, in another container, on another machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import socket
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
