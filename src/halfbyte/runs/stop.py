"""Ends runs of other processes by signals. Imports no torch."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.processes import Process
from .status import RunStatus, statuses_of, stop_processes

POLL = 0.1  # seconds between looks at a process that is to end
AGAIN_AFTER = 0.5  # seconds between the two signals of `now`
KILL_AFTER = 15.0  # seconds after which `now` kills a process; launchers give their ranks 5


def end_run(run: Path, now: bool) -> list[Path]:
    """Stop a run as the first Ctrl-C does, with a checkpoint; `now`: as the second one does. Returns when it has ended.

    Returns:
        The folder of the run, or those of its several adapters.

    Raises:
        ConfigError: the folder has no run, the run has ended, or its process is another machine's or user's.
    """
    statuses = statuses_of(run)
    processes = stop_processes(statuses)
    for process in processes:
        _send(process, signal.SIGTERM, statuses[0])
    for process in processes:
        if now and not _ends(process, AGAIN_AFTER):
            _send(process, signal.SIGTERM, statuses[0])
            if not _ends(process, KILL_AFTER):
                _send(process, signal.SIGKILL, statuses[0])
        _ends(process)
    return [status.folder for status in statuses]


def _send(process: Process, number: int, status: RunStatus) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        try:
            process.send_signal(number)
        except PermissionError as error:
            wrong = f"{status.folder}: process {process.pid} of the run belongs to another user"
            raise ConfigError(wrong, "ask that user to stop it") from error


def _ends(process: Process, seconds: float = float("inf")) -> bool:
    """Return whether a process ends within some seconds."""
    deadline = time.monotonic() + seconds
    while process.is_running:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
