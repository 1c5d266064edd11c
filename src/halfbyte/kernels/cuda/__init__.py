"""CUDA kernels: they say what Triton cannot, such as where in shared memory each lane looks.

`nvrtc` compiles a source once for each set of constants; `Kernel` loads and launches what came of it. Without NVRTC,
where it refuses the source, or where the device has too little for the kernel, the Triton kernels run instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ...dispatch import Unavailable
from ..device import device_at
from .nvrtc import Image, cubin

__all__ = ["Image", "Kernel", "cubin", "remembered"]

Result = TypeVar("Result")

MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COOPERATIVE_LAUNCH = 95  # CU_DEVICE_ATTRIBUTE_...
# CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, _COOPERATIVE_LAUNCH_TOO_LARGE, _NOT_SUPPORTED: nothing was launched
REFUSED_LAUNCHES = (701, 720, 801)
COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION = 2, 6  # CU_LAUNCH_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: a union of 64 bytes follows its number."""

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
    """`functools.cache` that remembers an Unavailable, too: what was refused is not compiled again."""

    @functools.cache
    def outcome(*arguments: Any) -> Result | Unavailable:
        try:
            return build(*arguments)
        except Unavailable as error:
            return Unavailable(str(error))  # without the frames that led there

    @functools.wraps(build)
    def call(*arguments: Any) -> Result:
        found = outcome(*arguments)
        if isinstance(found, Unavailable):
            raise Unavailable(str(found))
        return found

    call.cache_clear = outcome.cache_clear  # type: ignore[attr-defined]
    return call


class Kernel:
    """A kernel that is loaded on the current device.

    Args:
        image: what has it.
        name: of its `extern "C"` function.
        shared_bytes: dynamic shared memory of a block; None: what the image says.

    Raises:
        Unavailable: the device has not so much, or the driver does not load it.
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
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._check(self._driver.cuModuleLoadData(ctypes.byref(module), image.code))
            self._check(self._driver.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
            self._check(self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED_BYTES, shared_bytes))
        except RuntimeError as error:  # e.g. a driver that is older than NVRTC
            if torch.cuda.is_current_stream_capturing():
                raise  # of the capture, perhaps: nothing is known of the kernel
            raise Unavailable(f"the kernel does not load: {error}") from error

    def __call__(self, blocks: int, threads: int, arguments: Sequence[Any], together: bool = False) -> None:
        """Launch on torch's current stream; `arguments` are ctypes values of the C parameters' types.

        The kernel may begin while the one before it on the stream still runs, if that one lets it
        (griddepcontrol.launch_dependents): it must wait (griddepcontrol.wait) before it reads or writes what others do.
        With `together` it begins after that one instead, and all its blocks run at once, so that they may wait for each
        other.

        Raises:
            Unavailable: the driver refuses the launch, and nothing runs.
        """
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(argument) for argument in arguments])
        how = _Attribute(id=COOPERATIVE if together else PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        config = _Config(blocks, 1, 1, threads, 1, 1, self._shared, stream, ctypes.pointer(how), 1)
        self._check(self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None))

    def check_together(self, blocks: int, threads: int) -> None:
        """Ask before the first launch, which may be in a CUDA graph's capture.

        Raises:
            Unavailable: the current device does not run so many blocks at once.
        """
        able, each = ctypes.c_int(), ctypes.c_int()
        device = torch.cuda.current_device()
        self._check(self._driver.cuDeviceGetAttribute(ctypes.byref(able), COOPERATIVE_LAUNCH, device))
        self._check(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(each), self._function, threads, ctypes.c_size_t(self._shared)
            )
        )
        at_once = each.value * device_at(device).multiprocessors
        if not able.value or at_once < blocks:
            raise Unavailable(f"the device runs {at_once if able.value else 0} of {blocks} blocks at once")

    def _check(self, status: int) -> None:
        if status:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(message))
            kind = Unavailable if status in REFUSED_LAUNCHES else RuntimeError
            raise kind(f"CUDA driver: {(message.value or b'unknown error').decode()}")


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(f"the CUDA driver does not load: {error}") from error
