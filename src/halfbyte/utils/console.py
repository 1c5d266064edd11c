"""Plain-text rich console: no markup or control codes, any output encoding, and handling of closed pipes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.segment import Segment

from .notices import notice
from .streams import discard_stdout, to_encoding
from .text import visible


class Console(rich_console.Console):
    """Console that prints no markup, no emoji names, and no control codes in texts.

    Args:
        outlives_reader: if the reader closes the pipe, continue without output; default: raise BrokenPipeError.
        verbose: print details as well.
        options: rich's own arguments.
    """

    def __init__(self, *, outlives_reader: bool = False, verbose: bool = False, **options: Any):
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})
        self.outlives_reader, self.verbose = outlives_reader, verbose

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(to_encoding(visible(segment.text), self.encoding), segment.style)

    def on_broken_pipe(self) -> None:
        discard_stdout()
        if not self.outlives_reader:
            raise BrokenPipeError
        self.quiet = True
        notice("reader", "the reader of the output has closed it; the run continues without output")


def is_verbose(console: rich_console.Console) -> bool:
    """Return whether the console prints details."""
    return getattr(console, "verbose", False)


def has_colours(console: rich_console.Console) -> bool:
    """Return whether the console prints colours."""
    return console.color_system is not None and not console.no_color
