"""Being asked to leave: SIGTERM and SIGHUP as exceptions like Ctrl-C's, and a way to finish something first.

Only what the system would do by default is replaced: whoever ignores a signal (nohup) or handles it keeps that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

LEAVING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal ends the command, as Ctrl-C does.

    Args:
        number: of the signal; the command's exit code is 128 more.
        saved: what is saved and how to go on, for the user; may be empty.
    """

    def __init__(self, number: int, saved: str = ""):
        super().__init__(saved)
        self.number = signal.Signals(number)


@contextlib.contextmanager
def as_exceptions() -> Iterator[None]:
    """Around a command: SIGTERM and SIGHUP raise `Stopped`, so that what is half written is removed.

    A second one ends the process as it would without this.
    """

    def raise_it(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    with _handled(dict.fromkeys(LEAVING, raise_it)):
        yield


class Request:
    """Whether the process was asked to leave: by which signal (0: it was not), and how long ago."""

    number, since = 0, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since if self.number else 0.0


@contextlib.contextmanager
def as_requests(said: Callable[[int], None]) -> Iterator[Request]:
    """Around what looks now and then whether it is to leave: the first SIGTERM, SIGHUP or Ctrl-C only asks for it.

    The second raises what stands for it at once, and a third ends the process.

    Args:
        said: called with the first signal, while it is handled.
    """
    request = Request()

    def ask(number: int, frame: FrameType | None) -> None:
        if request.number:
            signal.signal(number, signal.SIG_DFL)
            raise Stopped(number)
        request.number, request.since = number, time.monotonic()
        said(number)

    with _handled(dict.fromkeys((*LEAVING, signal.SIGINT), ask)):
        yield request


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Signals go to `handlers` in this process, where they would end it or raise Python's or our own exception."""
    here = os.getpid()
    before: dict[signal.Signals, Any] = {}

    def own(handler: Callable[[int, FrameType | None], None]) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() == here:
                return handler(number, frame)
            signal.signal(number, signal.SIG_DFL)  # a forked worker has nothing to finish
            os.kill(os.getpid(), number)

        handle.halfbyte = True  # type: ignore[attr-defined]
        return handle

    if threading.current_thread() is threading.main_thread():  # Python's handlers are for that one alone
        for sign, handler in handlers.items():
            now = signal.getsignal(sign)
            if now in (signal.SIG_DFL, signal.default_int_handler) or hasattr(now, "halfbyte"):
                before[sign] = signal.signal(sign, own(handler))
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)
