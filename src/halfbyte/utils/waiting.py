"""Signs of life: what a command is waiting for, shown until it is done.

Code that takes long runs in `waiting("loading weights")`. A command chooses by `showing_waits` where waits are shown;
without it, nothing is printed. On a terminal a spinner names the innermost wait. In a pipe or a file a wait gets a line
after `FIRST` seconds, further ones every `REPEAT` seconds, and one at its end if it was `LONG`; waits within it only
change the name in these lines.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING

from .text import one_line

if TYPE_CHECKING:  # rich is imported when something is shown, since `halfbyte --help` needs none of it
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress, ProgressColumn
    from rich.spinner import Spinner

FIRST = 2.0  # seconds until a wait gets a line
REPEAT = 30.0  # seconds between further lines
LONG = 10.0  # seconds from which a wait's duration is printed at its end


class Waits:
    """The waits of this process, and where they are shown.

    Attributes:
        console: None: nowhere.
        names: what is waited for, outermost first.
        drawn: whether something on the terminal draws them, such as a progress bar with `spinner`.
    """

    def __init__(self) -> None:
        self.console: Console | None = None
        self.names: list[str] = []
        self.drawn = False
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began = self._due = 0.0  # on the monotonic clock
        self._announced = False

    def begin(self, name: str) -> None:
        """Add a wait; the outermost one is shown."""
        self.names.append(name)
        if self.console is None or len(self.names) > 1:
            return
        self.renew(name, FIRST)
        if not self.console.is_terminal or self.console.is_dumb_terminal:
            self._ended = threading.Event()
            threading.Thread(target=self._announce, args=(self.console, self._ended), daemon=True).start()
        else:
            self.start_spinner()

    def renew(self, name: str, first: float) -> None:
        """Start the outermost wait again under this name; its first line is due after `first` seconds."""
        self.names[0] = name
        self._announced = False
        self._began = time.monotonic()
        self._due = self._began + first

    def end(self, failed: bool) -> None:
        """Remove the innermost wait."""
        if len(self.names) == 1:
            self.stop_spinner()
        name = self.names.pop()
        if self.names:
            return
        with self._lock:
            self._ended.set()
        seconds = time.monotonic() - self._began
        if self._announced and self.console is not None and seconds >= LONG and not failed:
            self.console.print(one_line(f"{name}: {seconds:.0f} s"), soft_wrap=True)
        self._announced = False

    def start_spinner(self) -> None:
        """Draw the waits on a terminal, if there are any and nothing else draws them."""
        console = self.console
        if console is None or not console.is_terminal or console.is_dumb_terminal or self.drawn or not self.names:
            return
        from rich.live import Live

        self._live = Live(
            console=console,
            get_renderable=lambda: spinner() or "",
            refresh_per_second=8,
            transient=True,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)

    def stop_spinner(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _announce(self, console: Console, ended: threading.Event) -> None:
        """Print the lines that become due, until the outermost wait has ended."""
        while not ended.wait(max(0.0, self._due - time.monotonic())):
            now = time.monotonic()
            with self._lock, contextlib.suppress(OSError):  # the reader has gone
                if now < self._due or ended.is_set():
                    continue
                seconds = now - self._began
                self._due, self._announced = now + REPEAT, True
                so_far = "" if seconds < REPEAT else f" {seconds:.0f} s"
                console.print(one_line(f"{self.names[-1]} ...{so_far}"), soft_wrap=True)


_waits = Waits()


@cache
def _spinner() -> Spinner:
    from rich.spinner import Spinner

    return Spinner("dots")


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """Show that the code within the context, or the decorated function, runs.

    Args:
        name: what it does, such as "loading weights".
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _waits.begin(name)
    try:
        yield
    except BaseException:
        _waits.end(failed=True)
        raise
    _waits.end(failed=False)


def renew_wait(name: str) -> None:
    """Replace the outermost wait, if there is one, by a similar one: its first line is due after `REPEAT` seconds."""
    if _waits.names:
        _waits.renew(name, REPEAT)


@contextlib.contextmanager
def showing_waits(console: Console | None) -> Iterator[None]:
    """Within the context, show waits on `console`; on none if it is None or quiet."""
    previous, _waits.console = _waits.console, None if console is None or console.quiet else console
    try:
        yield
    finally:
        _waits.console = previous


def spinner() -> RenderableType | None:
    """Return a spinner with the innermost wait, for a display of its own; None without a wait."""
    if not _waits.names:
        return None
    _spinner().update(text=one_line(_waits.names[-1]))
    return _spinner()


@contextlib.contextmanager
def drawing_waits() -> Iterator[None]:
    """Within the context, something else on the terminal draws waits: they get no spinner of their own."""
    was_drawn, _waits.drawn = _waits.drawn, True
    _waits.stop_spinner()
    try:
        yield
    finally:
        _waits.drawn = was_drawn
        _waits.start_spinner()


@contextlib.contextmanager
def progress_bars(name: str, console: Console | None, *columns: ProgressColumn) -> Iterator[Progress]:
    """Return rich's progress bars, which vanish at the end; in a pipe, the lines of a wait.

    Args:
        name: of the wait.
        console: None: nothing is shown.
        columns: in addition to description, bar and share; default: the elapsed time.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    shown = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *(columns or (TimeElapsedColumn(),)))
    target = console or Console(quiet=True)
    with (
        showing_waits(console),
        drawing_waits(),
        waiting(name),
        Progress(*shown, console=target, transient=True, disable=not target.is_terminal) as progress,
    ):
        yield progress


@contextlib.contextmanager
def counting(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar where waits are shown; yields the function that sets how many of `total` are done."""
    with progress_bars(name, _waits.console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)
