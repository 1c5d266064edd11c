"""Pinned host memory: buffers registered with CUDA for direct access by the GPU.

Garbage collection may run during the capture of a CUDA graph, where synchronization makes the capture fail. A buffer
that is freed without being unregistered makes the registration of the next buffer at its address fail
(cudaErrorHostMemoryAlreadyRegistered). So the registry keeps each buffer alive until it is unregistered, and actions of
finalizers are deferred while a graph is being captured.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import TrainingError
from ..utils.hardware import is_capturing


def whole_pages(nbytes: int) -> Tensor:
    """uint8 [nbytes] in host memory that shares no page with other buffers, since CUDA registers full pages.

    torch's pinned allocator would round the size up to a power of two.

    Raises:
        TrainingError: the host does not have enough memory.
    """
    pages = -(-nbytes // mmap.PAGESIZE) + 1
    try:
        memory = torch.empty(pages * mmap.PAGESIZE, dtype=torch.uint8)
    except RuntimeError as error:
        raise TrainingError(f"{nbytes / 2**30:.2f} GiB of host memory are not free", "offload less") from error
    begin = -memory.data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + nbytes]


def _clear_error() -> None:
    """Clear this thread's last CUDA error, which torch's next kernel launch would report otherwise.

    torch does not expose cudaGetLastError; a launch reads, raises and clears the error.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


class AfterCapture:
    """Runs actions of finalizers immediately or, during the capture of a CUDA graph, after it.

    Garbage collection may start a finalizer between any two instructions, in any thread. So an action also waits while
    another one runs, and while `lock` is held.

    Args:
        capturing: returns whether a graph is being captured, in any thread.

    Attributes:
        lock: held while actions run; hold it to change what they change.
    """

    def __init__(self, capturing: Callable[[], bool] = is_capturing):
        self.capturing = capturing
        self.lock = threading.Lock()
        self._deferred: list[Callable[[], Any]] = []

    def do(self, action: Callable[[], Any]) -> None:
        """Run `action` now, or at the first `settle` when it need not wait any more."""
        self._deferred.append(action)
        self.settle()

    def settle(self) -> None:
        """Run deferred actions, unless a graph is being captured or `lock` is held.

        The next call retries an action that raises.
        """
        while self._deferred and not self.capturing() and self.lock.acquire(blocking=False):
            try:
                if self._deferred:
                    self._deferred[0]()
                    del self._deferred[0]
            finally:
                self.lock.release()


class HostMemory:
    """Reference-counted registry of the host buffers that are registered with CUDA.

    It keeps a buffer alive until it is unregistered.

    Args:
        runtime: returns the CUDA runtime, `torch.cuda.cudart()`.
        clear_error: clears the thread's last CUDA error.
        deferrals: runs actions that must not run during a capture.
    """

    def __init__(
        self,
        runtime: Callable[[], Any] = torch.cuda.cudart,
        clear_error: Callable[[], None] = _clear_error,
        deferrals: AfterCapture | None = None,
    ):
        self.runtime = runtime
        self.clear_error = clear_error
        self.deferrals = deferrals or AfterCapture()
        self._held: dict[int, tuple[Tensor, int]] = {}  # address → buffer and reference count

    @property
    def nbytes(self) -> int:
        """Registered bytes."""
        with self.deferrals.lock:
            return sum(buffer.nbytes for buffer, _ in self._held.values())

    def pin(self, buffer: Tensor) -> Tensor:
        """Register `buffer`, or add a reference to the registered buffer that contains it; each needs an `unpin`.

        Raises:
            TrainingError: the host does not have enough memory, or may not pin it (ulimit -l).
        """
        self.deferrals.settle()
        with self.deferrals.lock:
            address = self._holder(buffer)
            if address is not None:
                held, count = self._held[address]
                self._held[address] = held, count + 1
            elif code := int(self.runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
                self.clear_error()
                raise TrainingError(
                    f"{buffer.nbytes / 2**30:.2f} GiB of host memory could not be pinned (CUDA error {code})",
                    "free host memory, or set activation_checkpointing: checkpoint and expert_offload: false",
                )
            else:
                self._held[buffer.data_ptr()] = buffer, 1
        self.deferrals.settle()
        return buffer

    def unpin(self, buffers: Sequence[Tensor], settle: Callable[[], Any] | None = None) -> None:
        """Release one reference to each of `buffers`; during the capture of a CUDA graph, after it.

        Args:
            settle: blocks until nothing reads or writes the buffers; None: synchronize the device.
        """
        self.deferrals.do(partial(self._unpin, list(buffers), settle or torch.cuda.synchronize))

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
        """Address of the registered buffer that contains `buffer`, or None."""
        begin, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        holders = (address for address, (held, _) in self._held.items() if address <= begin)
        return next((address for address in holders if end <= address + self._held[address][0].nbytes), None)


AFTER_CAPTURE = AfterCapture()
HOST = HostMemory(deferrals=AFTER_CAPTURE)
