"""Tensors that wait for backward in the host's memory.

What a layer saves is copied to pinned memory on a stream of its own while the layers after it compute, and its device
memory is free once it is there. As many bytes as one layer saves may be on their way: where copies are slower than
layers, the layers wait. Backward asks for the last first; while a layer computes, as many bytes are on their way back.

Copies on the host are views of a few large slabs (`_Slabs`), so what is pinned is what the largest batch needs,
whatever lengths the others have. Slabs are registered with CUDA rather than taken from torch's pinned allocator, which
rounds sizes up to powers of two: 32 inputs of 2.8 GiB would take 128 GiB instead of 90.

A CUDA graph cannot hold this: its copies belong to a stream and to buffers that other steps share.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .pinned import AFTER_CAPTURE, HOST, whole_pages

SMALLEST = 2**20  # bytes; smaller tensors stay on the device
ALIGNED = 512  # bytes; where copies on the host begin
LARGEST_SLAB = 2**30  # bytes; of those that hold several copies


@dataclass(eq=False)
class _Copy:
    """The last copy of some memory, to the host or back: what is on the device then, and when it is there."""

    device: Tensor | None
    copied: Any  # event
    compute: Any  # the stream that `device` was made on


@dataclass(eq=False)
class _Offloaded:
    """Memory on its way: its host copy [numel], and its device copy while there is one."""

    number: int
    host: Tensor
    version: int
    last: _Copy
    views: int = 0  # that stand for tensors in it
    asked: int = 0  # how many of them backward has asked for

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def device(self) -> Tensor | None:
        return self.last.device


@dataclass(eq=False)
class _Slab:
    """Pinned memory that is filled from its beginning, and begun again once nothing in it is alive."""

    memory: Tensor  # uint8
    used: int = 0
    alive: int = 0

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.memory.nbytes

    def take(self, size: int) -> Tensor:
        self.alive += 1  # first: what garbage collection gives back meanwhile must not begin it again
        begin = self.used
        self.used = begin + size
        return self.memory[begin : begin + size]

    def give_back(self) -> None:
        self.alive -= 1
        if not self.alive:
            self.used = 0


class _Slabs:
    """Pinned memory for copies of any size, which die about in the reverse of the order they came in.

    What is pinned grows to what is alive at once and no further: shorter batches lie in the same slabs. A slab holds
    several copies, and is as large as all before it or `LARGEST_SLAB`; an empty one that became too small gives way.
    """

    def __init__(self, settle: Callable[[], None]):
        self.settle = settle  # waits for copies
        self.slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.nbytes for slab in self.slabs)

    def take(self, size: int) -> tuple[_Slab, Tensor]:
        """A slab and `size` bytes in it; `give_back` to the slab once they are read for the last time.

        Raises:
            TrainingError: as `HostMemory.pin`.
        """
        room = -(-size // ALIGNED) * ALIGNED
        slab = next((slab for slab in self.slabs if slab.has_room(room)), None) or self._another(room)
        return slab, slab.take(room)[:size]

    def _another(self, room: int) -> _Slab:
        several = min(max(4 * room, self.nbytes), LARGEST_SLAB) // room
        small = [slab for slab in self.slabs if not slab.alive]  # `room` is more than all of it
        if small:
            self.slabs[:] = [slab for slab in self.slabs if slab not in small]
            HOST.unpin([slab.memory for slab in small], self.settle)
        self.slabs.append(_Slab(HOST.pin(whole_pages(room * max(several, 1)))))
        return self.slabs[-1]


@dataclass(frozen=True)
class _View:
    """A saved tensor: how it lies in that memory."""

    memory: _Offloaded
    shape: torch.Size
    stride: tuple[int, ...]


class Offload:
    """Where saved tensors of one CUDA device wait; enter `hooks()` around each layer that saves them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._host = _Slabs(self.stream.synchronize)
        weakref.finalize(self, _unpin_slabs, self._host.slabs)
        self._leaving: deque[_Offloaded] = deque()  # whose device memory is held while it is copied
        self._waiting: dict[int, weakref.ref[_Offloaded]] = {}  # all that backward has not asked for, oldest first
        self._numbers = itertools.count()
        self._of_layer, self._in_flight = 0, 0  # bytes saved by this layer so far, and by the one that saved most

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is pinned."""
        return self._host.nbytes

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, dense tensors of `SMALLEST` bytes and more are saved in the host's memory."""
        self._of_layer = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """What stands for `tensor` from now on; itself where it is small, elsewhere or has gaps."""
        flat = _flat(tensor) if tensor.device == self.device and tensor.nbytes >= SMALLEST else None
        if flat is None:
            return tensor.detach()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offloaded activations are copied on a stream of their own")
        memory = next((each for each in self._leaving if _is_copy_of(each, flat)), None) or self._send(flat)
        memory.views += 1
        return _View(memory, tensor.shape, tensor.stride())

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """The tensor again; what was saved before it starts on its way back."""
        if not isinstance(packed, _View):
            return packed
        memory, compute = packed.memory, torch.cuda.current_stream(self.device)
        if memory in self._leaving:  # it may be written from here on, and a copy may still read it
            self._leaving.remove(memory)
        self._fetch(memory, compute)
        compute.wait_event(memory.last.copied)
        assert memory.device is not None
        tensor = memory.device.as_strided(packed.shape, packed.stride)
        memory.asked += 1
        if memory.asked == memory.views:  # a second backward fetches it again: this one may write to what it gets
            memory.last.device, memory.asked = None, 0
            self._waiting.pop(memory.number, None)
        self._foresee(compute)
        return tensor

    def _foresee(self, compute: Any) -> None:
        """Fetch what backward asks for next."""
        coming = 0
        for reference in list(reversed(self._waiting.values())):  # which shrinks where garbage is collected meanwhile
            memory = reference()
            if memory is not None:
                self._fetch(memory, compute)
                coming += memory.nbytes
            if coming >= self._in_flight:
                break

    def _send(self, flat: Tensor) -> _Offloaded:
        compute = torch.cuda.current_stream(self.device)
        slab, taken = self._host.take(flat.nbytes)
        host = taken.view(flat.dtype)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(flat, non_blocking=True)
            copied = self.stream.record_event()
        memory = _Offloaded(next(self._numbers), host, flat._version, _Copy(flat, copied, compute))
        self._waiting[memory.number] = weakref.ref(memory)
        weakref.finalize(memory, _forget, self._waiting, memory.number, slab, memory.last).atexit = False
        self._of_layer += flat.nbytes
        self._in_flight = max(self._in_flight, self._of_layer)
        self._leaving.append(memory)
        while sum(each.nbytes for each in self._leaving) > self._in_flight:
            self._release(self._leaving.popleft(), compute)
        return memory

    @staticmethod
    def _release(memory: _Offloaded, compute: Any) -> None:
        """Free its device memory once the copy is done, in the order of the computing stream."""
        compute.wait_event(memory.last.copied)
        memory.last.device = None

    def _fetch(self, memory: _Offloaded, compute: Any) -> None:
        """Start its way back, unless it is under way or never left."""
        if memory.device is not None:
            return
        # Made on the computing stream, whose earlier work may still use this memory.
        device = torch.empty_like(memory.host, device=self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            device.copy_(memory.host, non_blocking=True)
            copied = self.stream.record_event()
        memory.last.device, memory.last.copied, memory.last.compute = device, copied, compute


def _forget(waiting: dict[int, Any], number: int, slab: _Slab, last: _Copy) -> None:
    """Nobody holds that memory any more. What backward never asked for may still be on its way, and its device memory
    is free for others on the stream that made it: that stream waits."""
    waiting.pop(number, None)
    slab.give_back()
    if last.device is not None:
        AFTER_CAPTURE.do(partial(_return, last))


def _return(last: _Copy) -> None:
    """Free a copy's device memory, in the order of the stream that made it, once the copy is done."""
    last.compute.wait_event(last.copied)
    last.device = None


def _unpin_slabs(slabs: list[_Slab]) -> None:
    HOST.unpin([slab.memory for slab in slabs])


def _flat(tensor: Tensor) -> Tensor | None:
    """`tensor` as it lies in memory, [numel]; None where that has gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    laid_out = tensor.detach().permute(order)
    return laid_out.view(-1) if laid_out.is_contiguous() else None


def _is_copy_of(memory: _Offloaded, flat: Tensor) -> bool:
    """Whether several functions save the same values."""
    there = memory.device
    return (
        there is not None
        and (there.data_ptr(), there.numel(), there.dtype) == (flat.data_ptr(), flat.numel(), flat.dtype)
        and memory.version == flat._version
    )
