"""Sandbox for untrusted templates: a child process with limits on CPU time and memory.

A chat template is a program. jinja's sandbox blocks files and Python, but not `'x' * 10**10` or nested loops, and no
signal interrupts `10 ** 10 ** 9` inside C. So templates are rendered in a forked child, many documents per message. A
limit on its address space turns large allocations into MemoryErrors, and a timer of its CPU time, which a busy machine
does not advance, kills a child that takes too long.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..utils.errors import HalfbyteError

Item = TypeVar("Item")
Result = TypeVar("Result")

SECONDS = 0.5  # CPU time between two calls of `restart_clock`
MEMORY = 512 * 2**20
IDLE = 10.0  # seconds without a call after which a child exits, because it holds this process's memory pages
TIMEOUT = 600.0  # wall-clock seconds for an answer, on a busy machine or with many calls of `restart_clock`
FORKS = sys.platform == "linux"  # elsewhere forking a process with threads is unsafe, and there are no limits

_in_child = False
_IDLE_EXIT = 3  # exit code


@dataclass(frozen=True)
class Failure:
    """A call without a result, and the reason."""

    reason: str


class Bounded(Generic[Item, Result]):
    """Calls a function in a child process with limits.

    The child is forked at the first call, with this process's state at that time, and ends with this object.

    Args:
        function: takes a picklable item and returns a picklable result.
    """

    def __init__(self, function: Callable[[Item], Result]):
        self.function = function
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def __call__(self, items: Sequence[Item]) -> list[Result | Failure | HalfbyteError]:
        """Return for each item its result, halfbyte error or `Failure`, independently of the other items."""
        if not FORKS:
            return [_answer(self.function, item) for item in items]
        answers: list[Result | Failure | HalfbyteError] = []
        with self._lock:
            while len(answers) < len(items):  # an item that ends the child does not affect later items
                if self._child is None or self._child.owner != os.getpid() or self._child.ended:
                    self._child = _Child(self.function)
                self._child.ask(items[len(answers) :])
                while len(answers) < len(items):
                    answer = self._child.answer()
                    if not self._child.exited_idle:
                        answers.append(answer)
                    if self._child.ended:
                        break
        return answers

    def end(self) -> None:
        """End the child; the next call forks a new one with the state at that time."""
        if self._child is not None and self._child.owner == os.getpid() and not self._child.ended:
            self._child.end()

    def __del__(self) -> None:
        self.end()

    def __reduce__(self) -> tuple[Any, ...]:
        return Bounded, (self.function,)


def restart_clock(extra_seconds: float = 0.0) -> None:
    """Restart the time limit, so that each of a function's many inner calls gets the full limit.

    Args:
        more: seconds on top of `SECONDS`.
    """
    if _in_child:
        signal.setitimer(signal.ITIMER_PROF, SECONDS + extra_seconds)


def _answer(function: Callable[[Any], Any], item: Any) -> Any:
    """Return the function's result, its halfbyte error, or a Failure."""
    try:
        return function(item)
    except MemoryError:
        return Failure(f"it takes more than {MEMORY // 2**20} MiB of memory")
    except HalfbyteError as error:
        return error
    except Exception as error:
        return Failure(str(error)[:1000] or type(error).__name__)


class _Child:
    """A forked child that answers requests until the parent ends or closes the connection."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.owner = os.getpid()
        self.ended = self.exited_idle = False
        self.connection, child_connection = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about forks with threads: the child only computes
            self.pid = os.fork()
        if not self.pid:
            _serve(function, child_connection)
        child_connection.close()

    def ask(self, items: Sequence[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports it
            _send(self.connection, list(items))

    def answer(self) -> Any:
        """Receive the next answer; a Failure if the child has ended."""
        try:
            return pickle.loads(_receive(self.connection, TIMEOUT))
        except TimeoutError:
            problem = "it takes too long"
        except (EOFError, ConnectionResetError):
            problem = ""
        except BaseException:  # Ctrl-C: nothing will read the remaining answers
            self.end()
            raise
        status = self.end()
        self.exited_idle = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _IDLE_EXIT
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            problem = "it takes too long"
        return Failure(problem or "it ends the process that runs it")

    def end(self) -> int:
        """End the child and return its wait status."""
        self.ended = True
        self.connection.close()
        try:
            if (pid_and_status := os.waitpid(self.pid, os.WNOHANG))[0]:
                return pid_and_status[1]
            os.kill(self.pid, signal.SIGKILL)
            return os.waitpid(self.pid, 0)[1]
        except (ChildProcessError, ProcessLookupError):  # other code in this process reaps all children
            return 0


def _send(connection: socket.socket, value: Any) -> None:
    text = pickle.dumps(value)
    connection.settimeout(None)
    connection.sendall(len(text).to_bytes(8, "little") + text)


def _receive(connection: socket.socket, timeout: float) -> bytes:
    """Receive a message of `_send`, with a timeout in seconds for its first bytes.

    Raises:
        TimeoutError: no message arrived.
        EOFError: the connection is closed.
    """
    connection.settimeout(timeout)
    head = connection.recv(8, socket.MSG_WAITALL)
    connection.settimeout(None)
    left = int.from_bytes(head, "little")
    chunks = []
    while left and (chunk := connection.recv(min(left, 2**20), socket.MSG_WAITALL)):
        chunks.append(chunk)
        left -= len(chunk)
    if left or len(head) < 8:
        raise EOFError
    return b"".join(chunks)


def _serve(function: Callable[[Any], Any], connection: socket.socket) -> None:
    """Main loop of the child; never returns."""
    global _in_child
    try:
        _in_child = True
        gc.freeze()  # garbage collection must not copy shared pages
        _close_inherited(connection.fileno())
        with open("/proc/self/statm", encoding="ascii") as file:
            space = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # bytes of this process's address space
        while True:
            try:
                request = _receive(connection, IDLE)
            except TimeoutError:
                os._exit(_IDLE_EXIT)
            _limit(space + MEMORY + 20 * len(request))
            for item in pickle.loads(request):
                restart_clock()
                answer = _answer(function, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(connection, answer)
    except BaseException:
        os._exit(1)  # the parent sees the closed connection


def _close_inherited(descriptor: int) -> None:
    """Close all inherited descriptors except standard streams and `kept`, because an open one would hold a run's lock.

    Also reset the parent's signal handlers, and ignore Ctrl-C, which the parent handles.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))


def _limit(size: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
