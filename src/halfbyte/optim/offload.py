"""Optimizer state in pinned host memory, streamed through a window on the device during the step.

The state of all parameters of a launch is laid out in one host buffer per part (codes, scales, corrections), in the
order of the parameters, so that a window of consecutive tiles is one copy per part in each direction. Two windows
alternate: while one is updated, the next is copied in and the one before is copied out, so a step takes as long as the
slower direction of the link. No unified memory is involved: nothing is paged by the driver.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..memory.pinned import HOST, whole_pages
from ..ops.optimizer import Parameters
from ..ops.optimizer_state import STORAGES

WINDOW = 2**28  # bytes of state in a window
CUT = 2**16  # elements: parameters are cut at multiples, which are multiples of all blocks and tiles
ALIGN = 16  # bytes, of each parameter's part of a buffer


def device_bytes(state: int) -> int:
    """Device bytes of the windows for `state` bytes on the host."""
    return state if state <= WINDOW else 2 * WINDOW


@dataclass
class _Piece:
    """Elements [start, stop) of parameter number `at` of the launch; `is_last`: up to its end."""

    at: int
    start: int
    stop: int
    is_last: bool


@dataclass
class _Part:
    """One part of the state of all parameters of a launch.

    Attributes:
        each: elements per entry.
        offsets, sizes: first byte and bytes of each parameter's tensor in `host`.
        host: uint8, pinned.
        windows: uint8 [2, bytes] on the device; [1, bytes] if one window holds everything.
    """

    dtype: torch.dtype
    each: int
    offsets: list[int]
    sizes: list[int]
    host: Tensor
    windows: Tensor

    def span(self, piece: _Piece) -> tuple[int, int]:
        """First byte of a piece in `host`, and the byte after its last."""
        begin, end = (at // self.each * self.dtype.itemsize for at in (piece.start, piece.stop))
        offset = self.offsets[piece.at]
        return offset + begin, offset + (self.sizes[piece.at] if piece.is_last else end)


@dataclass
class _Window:
    pieces: list[_Piece]
    parameters: Parameters
    ranges: list[tuple[int, int]] = field(default_factory=list)  # bytes of each part


def pieces_of(sizes: Sequence[int], per_element: float) -> list[list[_Piece]]:
    """Divide parameters of `sizes` elements into windows of at most `WINDOW` bytes of state, in order."""
    most = max(int(WINDOW / per_element) // CUT * CUT, CUT)
    windows: list[list[_Piece]] = [[]]
    room = most
    for at, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                windows.append([])
                room = most
            # whole parameters if they fit; cuts are at multiples of CUT, so a rest of a window may stay empty
            take = size - start if size - start <= room else room // CUT * CUT
            if not take:
                room = 0
                continue
            windows[-1].append(_Piece(at, start, start + take, start + take == size))
            start, room = start + take, room - take
    return [window for window in windows if window]


class HostState:
    """The offloaded state of one launch.

    Args:
        parameters: the launch, whose `states` and `corrections` are on the host.
        sizes: elements of each parameter.
        device: of the weights. On a CPU everything is copied as on a GPU, without streams.

    Attributes:
        tensors: for each part, the state of each parameter as a view of the pinned buffer, in the order of codes and
            scales of each state, then corrections.
    """

    def __init__(self, parameters: Parameters, sizes: Sequence[int], device: torch.device):
        self.device, self.parameters, self.sizes = device, parameters, sizes
        self.parts: list[_Part] = []
        self.tensors: list[list[Tensor]] = []
        self._move()
        total = sum(part.host.nbytes for part in self.parts)
        self.windows = [self._window(pieces) for pieces in pieces_of(self.sizes, total / max(sum(self.sizes), 1))]
        for number, part in enumerate(self.parts):
            longest = max((end - begin for begin, end in (w.ranges[number] for w in self.windows)), default=0)
            buffers = min(2, len(self.windows))
            part.windows = torch.empty(buffers, -(-longest // ALIGN) * ALIGN, dtype=torch.uint8, device=device)
        for number, window in enumerate(self.windows):
            self._place(window, number % 2)
        if device.type == "cuda":
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._left: list[Any] = [torch.cuda.Event(), torch.cuda.Event()]  # a window's buffer has been copied out

    def _move(self) -> None:
        """Copy the state into pinned buffers."""
        own, storage = self.parameters, STORAGES[self.parameters.storage]
        for number in range(len(own.states[0])):
            self._add(storage.packed, [states[number][0] for states in own.states])
            scales = [each for states in own.states if (each := states[number][1]) is not None]
            if scales:
                self._add(storage.block, scales)
        if own.corrections:
            self._add(1, own.corrections)

    def _add(self, each: int, tensors: list[Tensor]) -> None:
        """Add a part; `each`: elements per entry."""
        dtype, sizes = tensors[0].dtype, [tensor.nbytes for tensor in tensors]
        ends = [*itertools.accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        host = whole_pages(ends[-1] or 1)
        if self.device.type == "cuda":
            weakref.finalize(self, HOST.unpin, [HOST.pin(host)])
        part = _Part(dtype, each, [0, *ends[:-1]], sizes, host, host)
        views = []
        for offset, tensor in zip(part.offsets, tensors, strict=True):
            views.append(host[offset : offset + tensor.nbytes].view(dtype))
            views[-1].copy_(tensor.view(-1))
        self.parts.append(part)
        self.tensors.append(views)

    def _window(self, pieces: list[_Piece]) -> _Window:
        own = self.parameters
        rows = own.rows[[piece.at for piece in pieces]]
        window = _Window(pieces, Parameters(own.rule, own.storage, own.rounding, rows, [], [], []))
        window.ranges = [(part.span(pieces[0])[0], part.span(pieces[-1])[1]) for part in self.parts]
        return window

    def _place(self, window: _Window, buffer: int) -> None:
        """Make the state of a window's launch views of a buffer on the device."""
        states: list[list[Tensor]] = []
        for piece in window.pieces:
            views = []
            for part, (first, _) in zip(self.parts, window.ranges, strict=True):
                begin, end = part.span(piece)
                views.append(part.windows[buffer, begin - first : end - first].view(part.dtype))
            states.append(views)
        corrected = 1 if self.parameters.corrections else 0
        has_scales = self.parameters.states[0][0][1] is not None
        for views in states:
            own = views[: len(views) - corrected]
            pairs = list(zip(own[::2], own[1::2], strict=True)) if has_scales else [(each, None) for each in own]
            window.parameters.states.append(pairs)  # type: ignore[arg-type]
            window.parameters.corrections += views[len(own) :]

    def read(self, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take the weights and gradients of the next step, contiguous and in the launch's order."""
        flat = [weight.view(-1) for weight in weights], [gradient.view(-1) for gradient in gradients]
        for window in self.windows:
            own = window.parameters
            own.weights, own.gradients = (
                [tensors[piece.at][piece.start : piece.stop] for piece in window.pieces] for tensors in flat
            )
            own.version += 1

    def step(self, update: Any) -> None:
        """Call `update(parameters)` on each window, with its state on the device."""
        if self.device.type != "cuda":
            for number, window in enumerate(self.windows):
                self._copy(window, number % 2, inward=True)
                update(window.parameters)
                self._copy(window, number % 2, inward=False)
            return
        current = torch.cuda.current_stream(self.device)
        self.inward.wait_stream(self.outward)  # the step before has left the host buffers
        self.inward.wait_stream(current)
        arrived = self._fetch(0)
        for number, window in enumerate(self.windows):
            current.wait_event(arrived)
            if number + 1 < len(self.windows):
                arrived = self._fetch(number + 1)
            update(window.parameters)
            self.outward.wait_stream(current)
            with torch.cuda.stream(self.outward):
                self._copy(window, number % 2, inward=False)
                self._left[number % 2].record()
        current.wait_stream(self.outward)  # the allocator may reuse the windows' memory

    def _fetch(self, number: int) -> Any:
        """Start copying a window in; returns the event of its arrival."""
        with torch.cuda.stream(self.inward):
            if number > 1:
                self.inward.wait_event(self._left[number % 2])
            self._copy(self.windows[number], number % 2, inward=True)
            return self.inward.record_event()

    def _copy(self, window: _Window, buffer: int, inward: bool) -> None:
        for part, (begin, end) in zip(self.parts, window.ranges, strict=True):
            host, device = part.host[begin:end], part.windows[buffer, : end - begin]
            source, target = (host, device) if inward else (device, host)
            target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        """Block until the state on the host is that of the last step."""
        if self.device.type == "cuda":
            self.outward.synchronize()
