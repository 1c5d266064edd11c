"""Tensors that wait for backward in the host's memory.

A layer's saved input is copied to pinned memory on a stream of its own while the next layer computes, and its device
memory is free after that one: two are there at a time, one read by the copy, one by the layer, and where copies are
slower than layers, the layers wait. Backward asks for them in reverse; while a layer computes, the input of the one
before it is on its way back.

Host buffers are made once for each size and used in every step. They are registered with CUDA rather than taken from
torch's pinned allocator, which rounds sizes up to powers of two: 32 inputs of 2.8 GiB would take 128 GiB instead of 90.

A CUDA graph cannot hold this: its copies belong to a stream and to buffers that other steps share.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError

SMALLEST = 2**20  # bytes; smaller tensors stay on the device
IN_FLIGHT = 1  # tensors whose device memory is held while they are copied


@dataclass(eq=False)
class _Offloaded:
    """A tensor on its way: its host copy [numel], and its device copy while there is one."""

    host: Tensor
    device: Tensor | None
    shape: torch.Size
    copied: Any  # event of the last copy
    previous: weakref.ref[_Offloaded] | None


class Offload:
    """Where saved tensors of one CUDA device wait; enter `hooks()` around the functions that save them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned)
        self._in_flight: deque[_Offloaded] = deque()
        self._last: weakref.ref[_Offloaded] | None = None

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, contiguous tensors of `SMALLEST` bytes and more are saved in the host's memory."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        if tensor.device != self.device or tensor.nbytes < SMALLEST or not tensor.is_contiguous():
            return tensor.detach()
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("offloaded activations are copied on a stream of their own")
        compute = torch.cuda.current_stream(self.device)
        host = self._buffer(tensor)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            host.copy_(tensor.detach().view(-1), non_blocking=True)
            copied = self.stream.record_event()
        packed = _Offloaded(host, tensor.detach(), tensor.shape, copied, self._last)
        weakref.finalize(packed, self._free[host.numel(), host.dtype].append, host)
        self._last = weakref.ref(packed)
        self._in_flight.append(packed)
        if len(self._in_flight) > IN_FLIGHT:
            self._release(self._in_flight.popleft(), compute)
        return packed

    @staticmethod
    def _release(packed: _Offloaded, compute: Any) -> None:
        """Free its device memory once the copy is done, in the order of the computing stream."""
        compute.wait_event(packed.copied)
        packed.device = None

    def _unpack(self, packed: Tensor | _Offloaded) -> Tensor:
        if not isinstance(packed, _Offloaded):
            return packed
        compute = torch.cuda.current_stream(self.device)
        if packed in self._in_flight:  # its memory may be written from here on, and a copy may still read it
            self._in_flight.remove(packed)
        self._fetch(packed, compute)
        previous = None if packed.previous is None else packed.previous()
        if previous is not None:
            self._fetch(previous, compute)
        compute.wait_event(packed.copied)
        tensor, packed.device = packed.device, None
        assert tensor is not None
        return tensor

    def _fetch(self, packed: _Offloaded, compute: Any) -> None:
        """Start its way back, unless it is under way or never left."""
        if packed.device is not None:
            return
        # Made on the computing stream, whose earlier work may still use this memory.
        packed.device = torch.empty(packed.shape, dtype=packed.host.dtype, device=self.device)
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            packed.device.view(-1).copy_(packed.host, non_blocking=True)
            packed.copied = self.stream.record_event()

    def _buffer(self, tensor: Tensor) -> Tensor:
        free = self._free.setdefault((tensor.numel(), tensor.dtype), [])
        if not free:
            free.append(_pin(torch.empty(tensor.numel(), dtype=tensor.dtype)))
            self._pinned.append(free[-1])
        return free.pop()


def _pin(buffer: Tensor) -> Tensor:
    """Let the device read and write it directly.

    Raises:
        TrainingError: the host has not that much memory, or may not pin it (ulimit -l).
    """
    code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        raise TrainingError(
            f"{buffer.nbytes / 2**30:.2f} GiB of host memory could not be pinned (CUDA error {code})",
            "free host memory, or set activation_checkpointing: checkpoint",
        )
    return buffer


def _unpin(buffers: list[Tensor]) -> None:
    torch.cuda.synchronize()  # copies may be under way
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
