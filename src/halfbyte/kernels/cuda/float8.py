"""`cuda/float8.cu`: 4-bit weights to E4M3, either way round, and E4M3 codes turned.

It takes a Hopper GPU or newer (griddepcontrol), aligned tensors and K in multiples of 32 (16 for codes); the rest is
Triton's. Measured on an H200 over the weights of an 8B model: 19 and 17 µs on average, turned and straight, where
Triton took 55 and 49.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ..device import HOPPER, device_at, device_of
from ..tiling import ceil_div
from . import Attempts, Kernel, cubin, remembered


class Weight(ctypes.Structure):
    """The struct of this name in `cuda/float8.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "absmax", "second", "code", "offset", "codebook", "factor")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    ]


_attempt = Attempts("float8-cuda", "weights go to FP8 by Triton kernels instead, more slowly")


@remembered
def _kernel(name: str, device: int, nested: bool, blocksize: int) -> Kernel:
    constants = {"NESTED": int(nested), "SHIFT": blocksize.bit_length() - 1}
    return Kernel(cubin("float8", device_at(device).capability, constants, [Weight]), name)


def _launch(
    name: str, nested: bool, blocksize: int, blocks: int, threads: int, arguments: Sequence, out: Tensor
) -> bool:
    """Run a kernel of `cuda/float8.cu`; True.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    with torch.cuda.device(out.get_device()):
        _kernel(name, out.get_device(), nested, blocksize)(blocks, threads, arguments)
    return True


def _suits(tensor: Tensor, multiples: tuple[int, int], shape: tuple[int, int], out: Tensor) -> bool:
    return (
        device_of(tensor).at_least(HOPPER)
        and shape[0] % multiples[0] == shape[1] % multiples[1] == out.stride(0) % 16 == 0
        and tensor.data_ptr() % 16 == out.data_ptr() % 16 == 0
    )


def try_of_blockwise4(
    weight: Sequence[Tensor], nested: bool, blocksize: int, shape: tuple[int, int], out: Tensor, turned: bool
) -> bool:
    """Write the E4M3 codes of a weight into `out`, where this can; returns whether it could.

    Args:
        weight: the tensors of `Weight`.
        shape: (N, K).
        out: E4M3 [N, K], or [K, N] if `turned`.
    """
    rows, width = shape
    if not _suits(weight[0], (4, 32), shape, out):
        return False
    threads = 128 if turned else 256
    blocks = ceil_div(rows, 128) * ceil_div(width, 128) if turned else ceil_div(rows * width // 16, threads)
    described = Weight(*[tensor.data_ptr() for tensor in weight], rows, width)
    arguments = [described, ctypes.c_void_p(out.data_ptr()), ctypes.c_uint32(out.stride(0))]
    name = "turned" if turned else "straight"
    return _attempt(_launch, name, nested, blocksize, blocks, threads, arguments, out) or False


def try_transpose(codes: Tensor, out: Tensor) -> bool:
    """Write FP8 codes [N, K], contiguous, into `out` [K, N], where this can; returns whether it could."""
    rows, width = codes.shape
    if not _suits(codes, (4, 16), (rows, width), out):
        return False
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, out)]
    numbers = [ctypes.c_uint32(number) for number in (rows, width, out.stride(0))]
    blocks = ceil_div(rows, 128) * ceil_div(width, 128)
    return _attempt(_launch, "transposed", False, 64, blocks, 256, [*places, *numbers], out) or False
