"""Host memory that is registered with CUDA, so that a GPU reads and writes it directly.

Garbage collection may come at any moment, that of a capture of a CUDA graph too. Waiting for the device then makes the
capture fail, and buffers that were freed without being unregistered would have the next buffer at their address refused
(cudaErrorHostMemoryAlreadyRegistered). So the registry holds each buffer until it is unregistered, and what finalizers
ask for is done once no graph is being captured.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import TrainingError
from ..utils.hardware import is_capturing


def whole_pages(nbytes: int) -> Tensor:
    """Host bytes [nbytes] that share no page with other memory, whose pages CUDA may have registered.

    torch's pinned allocator would round the size up to a power of two.
    """
    pages = -(-nbytes // mmap.PAGESIZE) + 1
    memory = torch.empty(pages * mmap.PAGESIZE, dtype=torch.uint8)
    begin = -memory.data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


def _clear_error() -> None:
    """Have CUDA forget this thread's last error, which torch's next kernel launch would report as its own.

    torch offers no cudaGetLastError; a launch reads the error, raises it and clears it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


class AfterCapture:
    """Actions of finalizers, run at once or, during a capture of a CUDA graph, after it.

    Args:
        capturing: whether a graph is being captured, in any thread.
    """

    def __init__(self, capturing: Callable[[], bool] = is_capturing):
        self.capturing = capturing
        self._waiting: list[Callable[[], Any]] = []

    def do(self, action: Callable[[], Any]) -> None:
        """Run `action` now, or at the first `settle` after the capture."""
        self._waiting.append(action)
        self.settle()

    def settle(self) -> None:
        """Run what waits, unless a graph is being captured. An action that raises waits for the next call."""
        while self._waiting and not self.capturing():
            action = self._waiting.pop(0)
            try:
                action()
            except BaseException:
                self._waiting.insert(0, action)
                raise


class HostMemory:
    """Registry of the host buffers that are registered with CUDA.

    Each range is registered once, however often it is asked for, and its buffer is alive until it is unregistered.

    Args:
        runtime: gives the CUDA runtime, `torch.cuda.cudart()`.
        clear_error: has the thread's last CUDA error forgotten.
        after: runs what must not happen during a capture.
    """

    def __init__(
        self,
        runtime: Callable[[], Any] = torch.cuda.cudart,
        clear_error: Callable[[], None] = _clear_error,
        after: AfterCapture | None = None,
    ):
        self.runtime, self.clear_error, self.after = runtime, clear_error, after or AfterCapture()
        self._held: dict[int, tuple[Tensor, int]] = {}  # address → buffer, and how often it was asked for

    @property
    def nbytes(self) -> int:
        """Bytes that are registered."""
        return sum(buffer.nbytes for buffer, _ in self._held.values())

    def pin(self, buffer: Tensor) -> Tensor:
        """Register `buffer`, or count it where it lies in one that is registered; `unpin` it as often.

        Raises:
            TrainingError: the host has not that much memory, or may not pin it (ulimit -l).
        """
        self.after.settle()
        address = self._holder(buffer)
        if address is not None:
            held, count = self._held[address]
            self._held[address] = held, count + 1
            return buffer
        code = int(self.runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
        if code:
            self.clear_error()
            raise TrainingError(
                f"{buffer.nbytes / 2**30:.2f} GiB of host memory could not be pinned (CUDA error {code})",
                "free host memory, or set activation_checkpointing: checkpoint and expert_offload: false",
            )
        self._held[buffer.data_ptr()] = buffer, 1
        return buffer

    def unpin(self, buffers: Sequence[Tensor], settle: Callable[[], Any] | None = None) -> None:
        """Unregister `buffers`, during a capture after it.

        Args:
            settle: waits until nothing reads or writes them; None: until the device is ready.
        """
        self.after.do(partial(self._unpin, list(buffers), settle or torch.cuda.synchronize))

    def _unpin(self, buffers: list[Tensor], settle: Callable[[], Any]) -> None:
        addresses = [address for buffer in buffers if (address := self._holder(buffer)) is not None]
        if addresses:
            settle()
        for address in addresses:
            held, count = self._held[address]
            if count > 1:
                self._held[address] = held, count - 1
                continue
            if int(self.runtime().cudaHostUnregister(address)):
                self.clear_error()
            del self._held[address]

    def _holder(self, buffer: Tensor) -> int | None:
        """Address of the registered buffer that has all bytes of `buffer`."""
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        holders = (address for address, (held, _) in self._held.items() if address <= begin)
        return next((address for address in holders if end <= address + self._held[address][0].nbytes), None)


AFTER_CAPTURE = AfterCapture()
HOST = HostMemory(after=AFTER_CAPTURE)
