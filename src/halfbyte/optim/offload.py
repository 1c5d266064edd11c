"""Optimizer state in pinned host memory, streamed through a window on the device during the step.

The state of all parameters of a launch is laid out in one host buffer per component (codes, scales, corrections), in
the order of the parameters, so that a window of consecutive tiles is one copy per component in each direction. Two
buffers on the device alternate between the windows of all launches: while one window is updated, the next is copied in
and the one before is copied out, so a step takes as long as the slower direction of the link. No unified memory is
involved: nothing is paged by the driver.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
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
class _Component:
    """One component of the state of all parameters of a launch.

    Attributes:
        entry_elements: elements per entry.
        offsets, sizes: first byte and bytes of each parameter's tensor in `host`.
        host: uint8, pinned.
    """

    dtype: torch.dtype
    entry_elements: int
    offsets: list[int]
    sizes: list[int]
    host: Tensor

    def span(self, piece: _Piece) -> tuple[int, int]:
        """First byte of a piece in `host`, and the byte after its last."""
        begin, end = (at // self.entry_elements * self.dtype.itemsize for at in (piece.start, piece.stop))
        offset = self.offsets[piece.at]
        return offset + begin, offset + (self.sizes[piece.at] if piece.is_last else end)


@dataclass
class _Window:
    """Consecutive pieces of a launch.

    Attributes:
        parameters: the launch of these pieces alone.
        ranges: bytes of each component in its host buffer.
        offsets: first byte of each component in a buffer on the device.
        nbytes: bytes in a buffer on the device.
        slot: number of that buffer.
        placed: the buffer that the states of `parameters` are views of.
    """

    pieces: list[_Piece]
    parameters: Parameters
    ranges: list[tuple[int, int]]
    offsets: list[int]
    nbytes: int
    slot: int
    placed: Tensor | None = None


class Windows:
    """Two buffers on a device that windows of state alternate between, and the streams that copy in and out.

    Args:
        device: of the weights. On a CPU everything is copied as on a GPU, without streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._count = 0  # windows so far
        self._nbytes = [0, 0]
        self._buffers: list[Tensor | None] = [None, None]
        self._fetched: list[_Window | None] = [None, None]  # whose state a buffer receives, until it is updated
        self.asynchronous = device.type == "cuda"
        if self.asynchronous:
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._arrived, self._left = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(self._nbytes)

    def take(self, nbytes: int) -> int:
        """Return the number of the buffer for a new window of `nbytes`."""
        slot, self._count = self._count % 2, self._count + 1
        self._nbytes[slot] = max(self._nbytes[slot], nbytes)
        return slot

    def buffer(self, slot: int) -> Tensor:
        """The buffer, uint8; allocated, or enlarged, when it is first used after `take`."""
        held = self._buffers[slot]
        if held is None or held.nbytes < self._nbytes[slot]:
            self.synchronize()
            self._buffers[slot] = self._fetched[slot] = None
            held = torch.empty(self._nbytes[slot], dtype=torch.uint8, device=self.device)
            self._buffers[slot] = held
            if self.asynchronous:
                self.inward.wait_stream(torch.cuda.current_stream(self.device))  # its memory may still be in use there
                for stream in (self.inward, self.outward):
                    held.record_stream(stream)
        return held

    def step(self, host: HostState, update: Any, following: HostState | None) -> None:
        """Call `update(parameters)` on each window of `host` with its state on the device, and copy the state back.

        Args:
            following: the state whose first window is fetched meanwhile, since it is probably stepped next.
        """
        current = [(host, window) for window in host.windows]
        following_window = (following, following.windows[0]) if following and following.windows else None
        successors = [*current[1:], following_window][: len(current)]
        for (_, window), successor in zip(current, successors, strict=True):
            self._fetch(host, window)
            if self.asynchronous:
                torch.cuda.current_stream(self.device).wait_event(self._arrived[window.slot])
            if successor is not None and successor[1].slot != window.slot:
                self._fetch(*successor)
            update(window.parameters)
            self._fetched[window.slot] = None
            buffer = self.buffer(window.slot)
            if self.asynchronous:
                self.outward.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.outward):
                    host.copy(window, buffer, inward=False)
                    self._left[window.slot].record()
            else:
                host.copy(window, buffer, inward=False)
            if successor is not None and successor[1].slot == window.slot:
                self._fetch(*successor)

    def _fetch(self, host: HostState, window: _Window) -> None:
        """Copy a window into its buffer, unless that has been started."""
        buffer = self.buffer(window.slot)
        if self._fetched[window.slot] is window:
            return
        host.bind(window, buffer)
        self._fetched[window.slot] = window
        if not self.asynchronous:
            host.copy(window, buffer, inward=True)
            return
        with torch.cuda.stream(self.inward):
            # what leaves the buffer has left it, and this window's state has reached the host in the step before
            self.inward.wait_event(self._left[0])
            self.inward.wait_event(self._left[1])
            host.copy(window, buffer, inward=True)
            self._arrived[window.slot].record()

    def synchronize(self) -> None:
        """Block until all copies have ended, so that the host has the state of the last step."""
        if self.asynchronous:
            self.inward.synchronize()
            self.outward.synchronize()


def pieces_of(sizes: Sequence[int], per_element: float) -> list[list[_Piece]]:
    """Divide parameters of `sizes` elements into windows of at most `WINDOW` bytes of state, in order."""
    limit = max(int(WINDOW / per_element) // CUT * CUT, CUT)
    windows: list[list[_Piece]] = [[]]
    room = limit
    for at, size in enumerate(sizes):
        start = 0
        while start < size:
            if not room:
                windows.append([])
                room = limit
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
        windows: the device's buffers.

    Attributes:
        tensors: for each component, the state of each parameter as a view of the pinned buffer, in the order of codes
            and scales of each state, then corrections.
        windows: consecutive parts of the state.
    """

    def __init__(self, parameters: Parameters, sizes: Sequence[int], windows: Windows):
        self.parameters = parameters
        self.buffers = windows
        self.components: list[_Component] = []
        self.tensors: list[list[Tensor]] = []
        windows.synchronize()  # the state may be in buffers of earlier launches, which receive the last step
        for number in range(len(parameters.states[0])):
            self._add(1, [states[number][0] for states in parameters.states])
            scales = [scale for states in parameters.states if (scale := states[number][1]) is not None]
            if scales:
                self._add(STORAGES[parameters.storage].block, scales)
        if parameters.corrections:
            self._add(1, parameters.corrections)
        self.has_scales = bool(parameters.states) and parameters.states[0][0][1] is not None
        self.has_corrections = bool(parameters.corrections)
        total = sum(component.host.nbytes for component in self.components)
        self.windows = [self._window(pieces) for pieces in pieces_of(sizes, total / max(sum(sizes), 1))]

    def _add(self, entry_elements: int, tensors: list[Tensor]) -> None:
        """Copy a component of the state, with `entry_elements` elements per entry, into a pinned buffer."""
        dtype, sizes = tensors[0].dtype, [tensor.nbytes for tensor in tensors]
        ends = [*itertools.accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        host = whole_pages(ends[-1] or 1)
        if self.buffers.asynchronous:
            weakref.finalize(self, HOST.unpin, [HOST.pin(host)])
        component = _Component(dtype, entry_elements, [0, *ends[:-1]], sizes, host)
        views = []
        for offset, tensor in zip(component.offsets, tensors, strict=True):
            views.append(host[offset : offset + tensor.nbytes].view(dtype))
            views[-1].copy_(tensor.view(-1))
        self.components.append(component)
        self.tensors.append(views)

    def _window(self, pieces: list[_Piece]) -> _Window:
        launch = self.parameters
        rows = launch.rows[[piece.at for piece in pieces]]
        parameters = Parameters(launch.rule, launch.storage, launch.rounding, rows, [], [], [])
        if launch.draws:
            firsts = [(launch.draws[piece.at], piece.start) for piece in pieces]
            parameters.draws = [(number, first + start) for (number, first), start in firsts]
        ranges = [(component.span(pieces[0])[0], component.span(pieces[-1])[1]) for component in self.components]
        ends = [*itertools.accumulate(-(-(end - begin) // ALIGN) * ALIGN for begin, end in ranges)]
        return _Window(pieces, parameters, ranges, [0, *ends[:-1]], ends[-1], self.buffers.take(ends[-1]))

    def bind(self, window: _Window, buffer: Tensor) -> None:
        """Make the states of a window's launch views of a buffer on the device."""
        if window.placed is buffer:
            return
        launch, window.placed = window.parameters, buffer
        launch.states, launch.corrections = [], []
        launch.launch.clear()  # has addresses of the states
        launch.version += 1
        for piece in window.pieces:
            views: list[Tensor] = []
            for component, (first, _), offset in zip(self.components, window.ranges, window.offsets, strict=True):
                begin, end = (at - first + offset for at in component.span(piece))
                views.append(buffer[begin:end].view(component.dtype))
            if self.has_corrections:
                launch.corrections.append(views.pop())
            pairs: Any = (
                zip(views[::2], views[1::2], strict=True) if self.has_scales else ((view, None) for view in views)
            )
            launch.states.append([*pairs])

    def read(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], same: bool) -> None:
        """Take the weights and gradients of the next step, contiguous and in the launch's order; see `Batch.read`."""
        flat = [weight.view(-1) for weight in weights], [gradient.view(-1) for gradient in gradients]
        for window in self.windows:
            launch = window.parameters
            launch.weights, launch.gradients = (
                [tensors[piece.at][piece.start : piece.stop] for piece in window.pieces] for tensors in flat
            )
            launch.version += not same

    def release(self) -> None:
        """Drop the references to gradients."""
        for window in self.windows:
            window.parameters.gradients = []

    def forget(self) -> None:
        """Drop the references to weights too."""
        for window in self.windows:
            window.parameters.weights = []

    def step(self, update: Any, following: HostState | None = None) -> None:
        """Call `update(parameters)` on each window, with its state on the device; see `Windows.step`."""
        self.buffers.step(self, update, following)

    def copy(self, window: _Window, buffer: Tensor, inward: bool) -> None:
        """Copy a window's components from the host to a buffer on the device, or back."""
        for component, (begin, end), offset in zip(self.components, window.ranges, window.offsets, strict=True):
            host, device = component.host[begin:end], buffer[offset : offset + end - begin]
            source, target = (host, device) if inward else (device, host)
            target.copy_(source, non_blocking=True)
