"""A reward function behind a process of its own, from the side of the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...utils.processes import LAUNCHER

LOADING = 60.0  # seconds that a function's file may take to be imported
BEGIN = "from halfbyte.rl.rewards.worker import main; main()"
PACKAGES = str(Path(__file__).parents[2])


class Failed(Exception):
    """The process gave no answer; the message says why."""


class RewardProcess:
    """Starts at the first question, and again after it has failed.

    Args:
        asked: what `worker.load` loads.
    """

    def __init__(self, asked: Mapping[str, Any]):
        self.asked = asked
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> str | None:
        """Load the function; what is wrong with it, or None.

        Raises:
            Failed: the process ended, or is not ready after `LOADING`.
        """
        if self._process is not None:
            return None
        own, other = Pipe()
        self._connection = own
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", BEGIN, str(other.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a function prints is for people
            pass_fds=[other.fileno()],
            start_new_session=True,
            env={**os.environ, LAUNCHER: str(os.getpid()), "PYTHONPATH": self._path()},
        )
        other.close()
        own.send_bytes(json.dumps(self.asked).encode())
        answer = self._answer(time.monotonic() + LOADING, "importing it")
        if "refused" in answer:
            self.close()
        return answer.get("refused")

    @staticmethod
    def _path() -> str:
        """Where the worker finds this very package."""
        return os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH", "")]))

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a question; `answer` waits for what comes of it.

        Raises:
            Failed: the process is gone.
        """
        if refused := self.start():
            raise Failed(refused)
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._gone() from None

    def answer(self, end: float) -> dict[str, Any]:
        """What the process answers until `end`, by the monotonic clock; later it is killed.

        Raises:
            Failed: it hangs, or has ended.
        """
        return self._answer(end, "its batch")

    def _answer(self, end: float, what: str) -> dict[str, Any]:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(end - time.monotonic(), 0)):
                self.close()
                raise Failed(f"{what} took too long")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> Failed:
        """Why the process answers no more."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is not None and code < 0:
            return Failed(f"its process was ended by {signal.Signals(-code).name}")
        return Failed("its process closed the connection" if code is None else f"its process exited with {code}")

    def close(self) -> None:
        """End the process, and those of its group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None
