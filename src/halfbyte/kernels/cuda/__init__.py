"""CUDA kernels, for what Triton cannot express, such as the shared-memory address of each lane.

`nvrtc` compiles a source once for each set of constants; `Kernel` loads and launches the result. Without NVRTC, if it
rejects the source, or if the device lacks resources for the kernel, the Triton kernels run instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...dispatch import Unavailable
from ..device import HOPPER, device_at
from .nvrtc import Image, cubin

__all__ = ["Image", "Kernel", "cubin", "remembered"]

Result = TypeVar("Result")

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COOPERATIVE_LAUNCH = 95  # CU_DEVICE_ATTRIBUTE_...
# CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, _COOPERATIVE_LAUNCH_TOO_LARGE, _NOT_SUPPORTED: the launch failed, nothing runs
REFUSED_LAUNCHES = (701, 720, 801)
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: its number, then a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("_pad", ctypes.c_int), ("value", ctypes.c_int), ("_rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def remembered(build: Callable[..., Result]) -> Any:
    """`functools.cache` that also caches Unavailable: a failed build is not repeated."""

    @functools.cache
    def outcome(*arguments: Any) -> Result | Unavailable:
        try:
            return build(*arguments)
        except Unavailable as error:
            return Unavailable(str(error))  # without the traceback's frames

    @functools.wraps(build)
    def call(*arguments: Any) -> Result:
        built = outcome(*arguments)
        if isinstance(built, Unavailable):
            raise Unavailable(str(built))
        return built

    call.cache_clear = outcome.cache_clear  # type: ignore[attr-defined]
    return call


class Kernel:
    """A kernel loaded on the current device.

    Args:
        image: the compiled source.
        name: its `extern "C"` function.
        shared_bytes: dynamic shared memory per block; None: as the image declares.

    Raises:
        Unavailable: the device has less shared memory, or the driver does not load the kernel.
    """

    def __init__(self, image: Image, name: str, shared_bytes: int | None = None):
        device = device_at(torch.cuda.current_device())
        shared_bytes = image.shared if shared_bytes is None else shared_bytes
        if shared_bytes > device.shared_bytes:
            raise Unavailable(
                f"{name} needs {shared_bytes / 1024:.0f} KiB of shared memory, and a block on {device.name} has "
                f"{device.shared_bytes / 1024:.0f}"
            )
        self._driver, self._shared = _driver(), shared_bytes
        self._overlaps = device.at_least(HOPPER)
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), image.code))
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            self._check(self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
        except RuntimeError as error:  # e.g. a driver older than NVRTC
            if torch.cuda.is_current_stream_capturing():
                raise  # may be caused by the capture and says nothing about the kernel
            raise Unavailable(f"the kernel does not load: {error}") from error

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Any], together: bool = False) -> None:
        """Launch on torch's current stream; `arguments` are ctypes values of the C parameters' types.

        From Hopper on, the kernel may start while the previous one on the stream still runs, if that one permits it
        (griddepcontrol.launch_dependents). It must then execute griddepcontrol.wait before it accesses memory of other
        kernels. With `together` it starts after the previous kernel, and all its blocks run concurrently, so that they
        can synchronise with each other.

        Raises:
            Unavailable: the driver refuses the launch, and nothing runs.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        attribute = _Attribute(id=COOPERATIVE if together else PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        attributes = int(together or self._overlaps)
        config = _Config(blocks, 1, 1, threads, 1, 1, self._shared, stream, ctypes.pointer(attribute), attributes)
        self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    def check_together(self, blocks: int, threads: int) -> None:
        """Check a cooperative launch in advance, since the first launch may be inside a CUDA graph's capture.

        Raises:
            Unavailable: the current device cannot run `blocks` blocks concurrently.
        """
        cooperative, blocks_per_multiprocessor = ctypes.c_int(), ctypes.c_int()
        device = torch.cuda.current_device()
        self._check(self._driver.cuDeviceGetAttribute(ctypes.byref(cooperative), COOPERATIVE_LAUNCH, device))
        self._check(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(blocks_per_multiprocessor), self._function, threads, ctypes.c_size_t(self._shared)
            )
        )
        concurrent = blocks_per_multiprocessor.value * device_at(device).multiprocessors
        if not cooperative.value or concurrent < blocks:
            raise Unavailable(f"the device runs {concurrent if cooperative.value else 0} of {blocks} blocks at once")

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(message))
            error_class = Unavailable if status in REFUSED_LAUNCHES else RuntimeError
            raise error_class(f"CUDA driver: {(message.value or b'unknown error').decode()}")


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"the CUDA driver does not load: {error}") from error
