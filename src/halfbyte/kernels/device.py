"""Properties of a device that kernels use to choose tiles, in one place, so that absent devices can be simulated.

Register and thread counts are the same on all devices; shared memory, instructions and multiprocessors differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..dispatch import Unavailable

RESERVED_SHARED_BYTES = 111  # CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK
TURING = (7, 5)  # first compute capability with mma.m16n8k8
AMPERE = (8, 0)  # first compute capability with mma.m16n8k16, bf16 and asynchronous copies
HOPPER = (9, 0)  # first compute capability with griddepcontrol and with this much shared memory per block:
HOPPER_SHARED_BYTES = 232448
NEEDS_HOPPER = "needs a Hopper GPU or newer"
LOCAL_BYTES = 65536  # local memory per work-group on AMD's and Intel's GPUs, where torch does not report it


@dataclass(frozen=True, eq=False)  # one instance per device, compared and hashed by identity
class Device:
    """Device properties for kernels.

    Args:
        name: shown to users.
        backend: "cuda", "hip" or "xpu"; "cpu" for Triton's interpreter.
        capability: compute capability of an NVIDIA GPU; (0, 0) for others, below every required one.
        shared_bytes: most shared memory per block.
        reserved_bytes: shared memory before a block's own; None if the driver does not report it.
        multiprocessors: their number.
    """

    name: str
    backend: str
    capability: tuple[int, int]
    shared_bytes: int
    reserved_bytes: int | None
    multiprocessors: int

    def at_least(self, capability: tuple[int, int]) -> bool:
        """Return whether this is an NVIDIA GPU of this compute capability or newer."""
        return self.backend == "cuda" and self.capability >= capability


def _nvidia(name: str, capability: tuple[int, int], shared_kib: int, multiprocessors: int) -> Device:
    return Device(name, "cuda", capability, shared_kib * 1024, 1024 * (capability >= AMPERE), multiprocessors)


KNOWN = {
    "t4": _nvidia("T4, RTX 20", (7, 5), 64, 40),
    "a100": _nvidia("A100", (8, 0), 163, 108),
    "rtx3090": _nvidia("RTX 30, A10, A6000", (8, 6), 99, 84),
    "rtx4090": _nvidia("RTX 40, L4, L40S", (8, 9), 99, 142),
    "h100": _nvidia("H100, H200", (9, 0), 227, 132),
    "b200": _nvidia("B200", (10, 0), 227, 148),
    "rtx5090": _nvidia("RTX 50, RTX PRO 6000", (12, 0), 99, 188),
    "mi200": Device("MI200", "hip", (0, 0), 65536, None, 110),
    "mi300": Device("MI300", "hip", (0, 0), 65536, None, 304),
    "cpu": Device("CPU", "cpu", (0, 0), 0, None, 0),
}
_assumed: Device | None = None


@contextlib.contextmanager
def assumed(device: Device) -> Iterator[None]:
    """Treat every tensor as if it were on `device`, so that kernels and tiles are chosen for it."""
    global _assumed
    previous, _assumed = _assumed, device
    try:
        yield
    finally:
        _assumed = previous


def device_of(tensor: Tensor) -> Device:
    return _assumed or _properties(tensor.device)


def device_at(index: int) -> Device:
    """The device that torch.cuda calls `index`."""
    return _assumed or _properties(torch.device("cuda", index))


def architecture_of(index: int) -> tuple[int, int]:
    """Compute capability to compile kernels for: the present GPU's, even if another device is assumed."""
    if _assumed is not None and not torch.cuda.is_available():
        return _assumed.capability
    return torch.cuda.get_device_capability(index)


def multiprocessors_of(index: int) -> int:
    return device_at(index).multiprocessors


def origin_of(index: int) -> int:
    """Bytes of a block's shared memory before the kernel's own: on the present GPU, even if another device is assumed.

    Raises:
        Unavailable: the driver does not report them.
    """
    device = _properties(torch.device("cuda", index)) if torch.cuda.is_available() else device_at(index)
    reserved = device.reserved_bytes
    if reserved is None:
        raise Unavailable("the driver does not say where shared memory begins")
    return reserved


@functools.cache
def _properties(device: torch.device) -> Device:
    if device.type == "xpu":
        xpu = torch.xpu.get_device_properties(device)
        shared = getattr(xpu, "local_mem_size", 0) or LOCAL_BYTES
        return Device(xpu.name, "xpu", (0, 0), shared, None, xpu.gpu_subslice_count)
    if device.type != "cuda":
        return Device("Triton's interpreter", "cpu", (0, 0), 2**31, None, 1)
    properties: Any = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or getattr(
        properties, "shared_memory_per_block", LOCAL_BYTES
    )  # ROCm has no opt-in limit
    if torch.version.hip is not None:  # which reports the architecture as capability
        return Device(properties.name, "hip", (0, 0), shared, None, properties.multi_processor_count)
    capability = properties.major, properties.minor
    reserved = _reserved_bytes(device.index)
    return Device(properties.name, "cuda", capability, shared, reserved, properties.multi_processor_count)


def _reserved_bytes(index: int) -> int | None:
    """Shared memory of a block before its own; None if the driver does not report it."""
    reserved = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(reserved), RESERVED_SHARED_BYTES, index)
    except OSError:
        return None
    return None if failed else reserved.value
