"""What part of a step gathers of weights are under way in, and a stage of a pipeline waits in.

Of one step in `EVERY`, by marks on the device's clock around each gather and around all that a stage computes: a few
launches, and nothing is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from halfbyte.parallel.mesh import Mesh
from halfbyte.parallel.shard.model import sharded

from .readback import Mark
from .stepper import Stepper

EVERY = 10
GATHERS, IDLE = "gather_share", "idle_share"

Span = tuple[Mark, Mark]


class Watched(Protocol):
    """What enters `watch` around each piece of its work; not while a CUDA graph is captured."""

    watch: Any


def shares_of(mesh: Mesh, device: torch.device, model: Any, stepper: Stepper) -> Shares:
    """Those of a run that is divided so."""
    watched: dict[str, Watched] = {}
    if (share := sharded(model)) is not None:
        watched[GATHERS] = share.stats
    if stepper.pipeline is not None:
        watched[IDLE] = stepper.pipeline
    return Shares(device if mesh.size > 1 else None, watched)


class Shares:
    """Of the steps of one process.

    Args:
        device: whose clock counts; None: nothing is counted, since the process is alone.
        watched: `GATHERS`, `IDLE` or both → what does that work. Of the latter the rest of the step counts.

    Attributes:
        step: begin and end of the last step, as far as the process computed by itself.
    """

    def __init__(self, device: torch.device | None, watched: Mapping[str, Watched]):
        self.device, self.watched = device, watched
        self.step: Span | None = None
        self._spans: dict[str, list[Span]] = {}
        self._found: tuple[Span, dict[str, list[Span]]] | None = None

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Around the forwards and backwards of a step, by its number from 1."""
        if self.device is None:
            yield
            return
        watched = self.watched if number % EVERY == 1 else {}
        self._spans = {name: [] for name in watched}
        for name, each in watched.items():
            each.watch = partial(self._span, self._spans[name])
        began = Mark(self.device)
        try:
            yield
        finally:
            for each in watched.values():
                del each.watch
        self.step = began, Mark(self.device)
        if watched:
            self._found = self.step, self._spans

    @contextlib.contextmanager
    def _span(self, spans: list[Span], *_: Any) -> Iterator[None]:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            yield
            return
        assert self.device is not None
        began = Mark(self.device)
        yield
        spans.append((began, Mark(self.device)))

    def read(self) -> dict[str, float]:
        """The shares of the last step that was counted, each time it is there for the first time; waits for its end."""
        found, self._found = self._found, None
        if found is None:
            return {}
        (began, end), spans = found
        whole = end.seconds_since(began)
        seen = {name: each for name, each in spans.items() if each}  # nothing of what a CUDA graph replays
        parts = {name: sum(end.seconds_since(began) for began, end in each) / whole for name, each in seen.items()}
        return {name: 1 - part if name == IDLE else part for name, part in parts.items()}
