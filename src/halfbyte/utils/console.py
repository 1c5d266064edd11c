"""rich's console as halfbyte uses it: text is text, in any encoding, and a reader may leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console as rich_console
from rich.segment import Segment

from .notices import notice
from .streams import discard_stdout, in_encoding
from .text import visible


class Console(rich_console.Console):
    """Prints no markup, no emoji names, and no control code that a text brings.

    Args:
        outlives_reader: when nobody reads the output any more, go on in silence; else a BrokenPipeError is raised.
        how: rich's own arguments.
    """

    def __init__(self, *, outlives_reader: bool = False, **how: Any):
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **how})
        self.outlives_reader = outlives_reader

    def render(
        self, renderable: rich_console.RenderableType, options: rich_console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(in_encoding(visible(segment.text), self.encoding), segment.style)

    def on_broken_pipe(self) -> None:
        discard_stdout()
        if not self.outlives_reader:
            raise BrokenPipeError
        self.quiet = True
        notice("reader", "nobody reads the output any more; the run goes on without it")


def coloured(console: rich_console.Console) -> bool:
    """Whether colours tell things apart there."""
    return console.color_system is not None and not console.no_color
