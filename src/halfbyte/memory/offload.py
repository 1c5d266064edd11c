"""Offload of saved activations to host memory.

Tensors that a layer saves are copied to pinned memory on a separate stream while the next layers compute; the device
memory is freed when the copy is done. The bytes in flight are limited to one layer's activations, so compute blocks if
copies are slower than layers. The backward unpacks in reverse order and prefetches the same number of bytes.

Host copies are views of a few large slabs (`_Slabs`), so pinned memory grows with the largest batch only, whatever
the shapes of other batches. Slabs are registered with CUDA instead of allocated by torch's pinned allocator, which
rounds sizes up to powers of two: 32 tensors of 2.8 GiB would take 128 GiB instead of 90.

CUDA graphs cannot capture this: the copies use a separate stream and buffers that other steps share.
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
ALIGNMENT = 512  # bytes; every host copy starts at a multiple of it
LARGEST_SLAB = 2**30  # bytes; limit for slabs that hold several copies


@dataclass(eq=False)
class _Copy:
    """The last copy of an offloaded tensor, to the host or back."""

    device: Tensor | None  # source or target on the device
    copied: Any  # CUDA event after the copy
    compute: Any  # stream that `device` was allocated on


@dataclass(eq=False)
class _Offloaded:
    """An offloaded block of memory: its host copy [numel], and its device copy while there is one."""

    number: int
    host: Tensor
    version: int
    last: _Copy
    views: int = 0  # number of saved tensors in it
    unpacked: int = 0  # how many of these the backward has unpacked

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def device(self) -> Tensor | None:
        return self.last.device


@dataclass(eq=False)
class _Slab:
    """A bump allocator in pinned memory, reset once none of its allocations is alive."""

    memory: Tensor  # uint8
    used: int = 0
    alive: int = 0

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.memory.nbytes

    def take(self, size: int) -> Tensor:
        self.alive += 1  # first, so that a `give_back` by the garbage collector in between does not reset it
        begin = self.used
        self.used = begin + size
        return self.memory[begin : begin + size]

    def give_back(self) -> None:
        self.alive -= 1
        if not self.alive:
            self.used = 0


class _Slabs:
    """Pinned memory for host copies of any size, which are freed roughly in reverse order of allocation.

    Pinned memory grows to the peak of live copies, and batches of other shapes reuse the same slabs. A slab holds
    several copies; it is as large as all earlier slabs together, at most `LARGEST_SLAB`. An empty slab that is too
    small for a new copy is replaced.
    """

    def __init__(self, settle: Callable[[], None]):
        self.settle = settle  # blocks until all copies are done
        self.slabs: list[_Slab] = []

    @property
    def nbytes(self) -> int:
        return sum(slab.memory.nbytes for slab in self.slabs)

    def take(self, size: int) -> tuple[_Slab, Tensor]:
        """A slab and `size` bytes in it; call `give_back` of the slab after the last read.

        Raises:
            TrainingError: see `HostMemory.pin`.
        """
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        slab = next((slab for slab in self.slabs if slab.has_room(padded)), None) or self._new_slab(padded)
        return slab, slab.take(padded)[:size]

    def _new_slab(self, size: int) -> _Slab:
        """A slab for copies of `size` bytes; frees empty slabs, which are smaller than `size`."""
        copies = min(max(4 * size, self.nbytes), LARGEST_SLAB) // size
        empty = [slab for slab in self.slabs if not slab.alive]
        if empty:
            self.slabs[:] = [slab for slab in self.slabs if slab not in empty]
            HOST.unpin([slab.memory for slab in empty], self.settle)
        self.slabs.append(_Slab(HOST.pin(whole_pages(size * max(copies, 1)))))
        return self.slabs[-1]


@dataclass(frozen=True)
class _View:
    """A saved tensor as a strided view of offloaded memory."""

    memory: _Offloaded
    shape: torch.Size
    stride: tuple[int, ...]


class Offload:
    """Offload of the saved tensors of one CUDA device; enter `hooks()` around the forward of each layer."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._host = _Slabs(self.stream.synchronize)
        slabs = self._host.slabs
        weakref.finalize(self, lambda: HOST.unpin([slab.memory for slab in slabs]))
        self._outgoing: deque[_Offloaded] = deque()  # being copied to the host; hold their device memory
        self._offloaded: dict[int, weakref.ref[_Offloaded]] = {}  # not unpacked yet, oldest first
        self._numbers = itertools.count()
        self._layer_bytes, self._in_flight = 0, 0  # bytes saved by the current layer, and their maximum over layers

    @property
    def pinned_bytes(self) -> int:
        """Host memory that is pinned."""
        return self._host.nbytes

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Within the context, offload saved tensors of at least `SMALLEST` bytes that are dense in memory."""
        self._layer_bytes = 0
        with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Tensor | _View:
        """Offload `tensor`; returns the tensor itself if it is small, on another device or has gaps."""
        flat = _flat(tensor) if tensor.device == self.device and tensor.nbytes >= SMALLEST else None
        if flat is None:
            return tensor.detach()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot capture offloaded activations, which are copied on another stream")
        sent = next((outgoing for outgoing in self._outgoing if _is_copy_of(outgoing, flat)), None)
        memory = sent or self._send(flat)
        memory.views += 1
        return _View(memory, tensor.shape, tensor.stride())

    def unpack(self, packed: Tensor | _View) -> Tensor:
        """The tensor on the device; starts to fetch the tensors that were saved before it."""
        if not isinstance(packed, _View):
            return packed
        memory, compute = packed.memory, torch.cuda.current_stream(self.device)
        if memory in self._outgoing:  # the backward may write to it, after the copy to the host (`wait_event` below)
            self._outgoing.remove(memory)
        self._fetch(memory, compute)
        compute.wait_event(memory.last.copied)
        assert memory.device is not None
        tensor = memory.device.as_strided(packed.shape, packed.stride)
        memory.unpacked += 1
        if memory.unpacked == memory.views:  # a second backward fetches again, since this one may overwrite the tensor
            memory.last.device, memory.unpacked = None, 0
            self._offloaded.pop(memory.number, None)
        self._prefetch(compute)
        return tensor

    def _prefetch(self, compute: Any) -> None:
        """Fetch the tensors that the backward unpacks next, up to `_in_flight` bytes."""
        fetched = 0
        for reference in list(reversed(self._offloaded.values())):  # a copy: garbage collection may remove entries
            memory = reference()
            if memory is not None:
                self._fetch(memory, compute)
                fetched += memory.nbytes
            if fetched >= self._in_flight:
                break

    def _send(self, flat: Tensor) -> _Offloaded:
        compute = torch.cuda.current_stream(self.device)
        slab, host_bytes = self._host.take(flat.nbytes)
        host = host_bytes.view(flat.dtype)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(flat, non_blocking=True)
            copied = self.stream.record_event()
        memory = _Offloaded(next(self._numbers), host, flat._version, _Copy(flat, copied, compute))
        self._offloaded[memory.number] = weakref.ref(memory)
        weakref.finalize(memory, _forget, self._offloaded, memory.number, slab, memory.last).atexit = False
        self._layer_bytes += flat.nbytes
        self._in_flight = max(self._in_flight, self._layer_bytes)
        self._outgoing.append(memory)
        while sum(outgoing.nbytes for outgoing in self._outgoing) > self._in_flight:
            self._release(self._outgoing.popleft(), compute)
        return memory

    @staticmethod
    def _release(memory: _Offloaded, compute: Any) -> None:
        """Free the device memory after the copy, in order of the computing stream."""
        compute.wait_event(memory.last.copied)
        memory.last.device = None

    def _fetch(self, memory: _Offloaded, compute: Any) -> None:
        """Start the copy to the device, unless a device copy exists or is in flight."""
        if memory.device is not None:
            return
        # Allocated on the computing stream, whose earlier work may still use the memory.
        device = torch.empty_like(memory.host, device=self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            device.copy_(memory.host, non_blocking=True)
            copied = self.stream.record_event()
        memory.last.device = device
        memory.last.copied = copied
        memory.last.compute = compute


def _forget(offloaded: dict[int, Any], number: int, slab: _Slab, last: _Copy) -> None:
    """Finalizer of `_Offloaded`. Without a backward, its last copy may still be in flight."""
    offloaded.pop(number, None)
    slab.give_back()
    if last.device is not None:
        AFTER_CAPTURE.do(partial(_free_device_memory, last))


def _free_device_memory(last: _Copy) -> None:
    """Free a copy's device memory after the copy, in order of the stream that allocated it."""
    last.compute.wait_event(last.copied)
    last.device = None


def _flat(tensor: Tensor) -> Tensor | None:
    """`tensor` flattened in memory order, [numel]; None if it has gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    laid_out = tensor.detach().permute(order)
    return laid_out.view(-1) if laid_out.is_contiguous() else None


def _is_copy_of(memory: _Offloaded, flat: Tensor) -> bool:
    """Whether `flat` is the memory that is being copied, unmodified, because several functions save the tensor."""
    source = memory.device
    return (
        source is not None
        and (source.data_ptr(), source.numel(), source.dtype) == (flat.data_ptr(), flat.numel(), flat.dtype)
        and memory.version == flat._version
    )
