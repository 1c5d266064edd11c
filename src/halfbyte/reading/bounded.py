"""Running what somebody else wrote under a limit of time and memory, in a child process that can be killed.

A chat template is a program. jinja's sandbox keeps it from files and from Python, but not from `'x' * 10**10` or from
loops in loops, and no signal ends `10 ** 10 ** 9` inside C. So templates are rendered in a forked copy of this process,
many documents a message: a limit on its address space makes MemoryErrors of what is too large, and
a timer of its CPU time, so that a busy machine changes nothing, ends what takes too long.
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
IDLE = 10.0  # seconds without a call after which a child ends: it keeps the memory that this process had
PATIENCE = 600.0  # seconds on the clock for an answer: of a busy machine, or of many calls of `restart_clock`
FORKS = sys.platform == "linux"  # elsewhere a fork of a process with threads is not safe, and nothing is limited


_in_child = False
_WAS_IDLE = 3  # exit code


@dataclass(frozen=True)
class Failure:
    """A call that gave no result, and why in a few words."""

    said: str


class Bounded(Generic[Item, Result]):
    """`function`, called in a child process under limits.

    The child is forked when it is first needed, knows what this process knew then, and ends with this object.

    Args:
        function: of one item that can be pickled, to a result that can.
    """

    def __init__(self, function: Callable[[Item], Result]):
        self.function = function
        self._child: _Child | None = None
        self._lock = threading.Lock()

    def __call__(self, items: Sequence[Item]) -> list[Result | Failure | HalfbyteError]:
        """The result of each item, or what it raised or ran into; one of them does not touch the others."""
        if not FORKS:
            return [_answer(self.function, item) for item in items]
        answers: list[Result | Failure | HalfbyteError] = []
        with self._lock:
            while len(answers) < len(items):  # a child that one item ended is replaced for those behind it
                if self._child is None or self._child.owner != os.getpid() or self._child.ended:
                    self._child = _Child(self.function)
                self._child.ask(items[len(answers) :])
                while len(answers) < len(items):
                    answer = self._child.answer()
                    if not self._child.was_idle:
                        answers.append(answer)
                    if self._child.ended:
                        break
        return answers

    def end(self) -> None:
        """End the child; the next call has one that knows what this process knows by then."""
        if self._child is not None and self._child.owner == os.getpid() and not self._child.ended:
            self._child.end()

    def __del__(self) -> None:
        self.end()

    def __reduce__(self) -> tuple[Any, ...]:
        return Bounded, (self.function,)


def restart_clock(more: float = 0.0) -> None:
    """Begin the time limit anew: for what one function calls many times, each time with a right to the whole.

    Args:
        more: seconds beyond `SECONDS`, for what has much to do.
    """
    if _in_child:
        signal.setitimer(signal.ITIMER_PROF, SECONDS + more)


def _answer(function: Callable[[Any], Any], item: Any) -> Any:
    try:
        return function(item)
    except MemoryError:
        return Failure(f"it takes more than {MEMORY // 2**20} MiB of memory")
    except HalfbyteError as error:
        return error
    except Exception as error:
        return Failure(str(error)[:1000] or type(error).__name__)


class _Child:
    """A forked copy of this process that answers until this process ends or closes the connection."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.owner, self.ended, self.was_idle = os.getpid(), False, False
        self.connection, theirs = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads: the child only computes
            self.pid = os.fork()
        if not self.pid:
            _serve(function, theirs)
        theirs.close()

    def ask(self, items: Sequence[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` says so
            _send(self.connection, list(items))

    def answer(self) -> Any:
        """The next answer; without one the child has ended."""
        try:
            return pickle.loads(_receive(self.connection, PATIENCE))
        except TimeoutError:
            said = "it takes too long"
        except (EOFError, ConnectionResetError):
            said = ""
        except BaseException:  # Ctrl-C: the answers still to come are nobody's
            self.end()
            raise
        status = self.end()
        self.was_idle = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _WAS_IDLE
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            said = "it takes too long"
        return Failure(said or "it ends the process that runs it")

    def end(self) -> int:
        """End it, and say how it ended."""
        self.ended = True
        self.connection.close()
        try:
            if (found := os.waitpid(self.pid, os.WNOHANG))[0]:
                return found[1]
            os.kill(self.pid, signal.SIGKILL)
            return os.waitpid(self.pid, 0)[1]
        except (ChildProcessError, ProcessLookupError):  # somebody else waits for every child of this process
            return 0


def _send(connection: socket.socket, value: Any) -> None:
    text = pickle.dumps(value)
    connection.settimeout(None)
    connection.sendall(len(text).to_bytes(8, "little") + text)


def _receive(connection: socket.socket, patience: float) -> bytes:
    """What `_send` sent; its beginning is waited for for `patience` seconds.

    Raises:
        TimeoutError: nothing came.
        EOFError: nothing will.
    """
    connection.settimeout(patience)
    head = connection.recv(8, socket.MSG_WAITALL)
    connection.settimeout(None)
    left = int.from_bytes(head, "little")
    parts = []
    while left and (part := connection.recv(min(left, 2**20), socket.MSG_WAITALL)):
        parts.append(part)
        left -= len(part)
    if left or len(head) < 8:
        raise EOFError
    return b"".join(parts)


def _serve(function: Callable[[Any], Any], connection: socket.socket) -> None:
    """What the child does, to its end."""
    global _in_child
    try:
        _in_child = True
        gc.freeze()  # collections leave the pages alone that both processes share
        _only(connection.fileno())
        space = _address_space()
        while True:
            try:
                request = _receive(connection, IDLE)
            except TimeoutError:
                os._exit(_WAS_IDLE)
            _limit(space + MEMORY + 20 * len(request))
            for item in pickle.loads(request):
                restart_clock()
                answer = _answer(function, item)
                signal.setitimer(signal.ITIMER_PROF, 0)
                _send(connection, answer)
    except BaseException:
        os._exit(1)  # whatever it is: the parent sees that no answer comes


def _only(kept: int) -> None:
    """Hold nothing of the parent's but standard streams and `kept`: a lock on a run ends with the process that has it.

    The parent's handlers of signals are its own, and Ctrl-C is for the parent to hear.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _address_space() -> int:
    """Bytes of this process's address space."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit(size: int) -> None:
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
