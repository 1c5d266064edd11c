"""`cuda/float8.cu`: 4-bit weights to E4M3, either way round, and E4M3 codes turned.

It takes a Hopper GPU or newer (griddepcontrol), aligned tensors and K in multiples of 32 (16 for codes); the rest is
Triton's. Measured on an H200 over the weights of an 8B model: 19 and 17 µs on average, turned and straight, where
Triton took 55 and 49.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..notices import notice
from .cuda import BuildError, Kernel, cubin
from .launch import ceil_div

CAPABILITY = (9, 0)


class Weight(ctypes.Structure):
    """The struct of this name in `cuda/float8.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "absmax", "second", "code", "offset", "codebook", "factor")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    ]


@functools.cache
def _kernel(name: str, device: int, nested: bool, blocksize: int) -> Kernel | None:
    """None where it does not compile, which is said."""
    constants = {"NESTED": int(nested), "SHIFT": blocksize.bit_length() - 1}
    try:
        with torch.cuda.device(device):
            return Kernel(cubin("float8", torch.cuda.get_device_capability(device), constants), name, 0)
    except BuildError as error:
        notice("float8-cuda", f"{error}; weights go to FP8 by Triton kernels instead, more slowly")
        return None


def _suits(tensor: Tensor, multiples: tuple[int, int], shape: tuple[int, int], out: Tensor) -> bool:
    return (
        tensor.is_cuda
        and torch.version.hip is None
        and torch.cuda.get_device_capability(tensor.device) >= CAPABILITY
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
    kernel = _kernel("turned" if turned else "straight", out.get_device(), nested, blocksize)
    if kernel is None:
        return False
    threads = 128 if turned else 256
    blocks = ceil_div(rows, 128) * ceil_div(width, 128) if turned else ceil_div(rows * width // 16, threads)
    described = Weight(*[tensor.data_ptr() for tensor in weight], rows, width)
    with torch.cuda.device(out.device):
        kernel(blocks, threads, [described, ctypes.c_void_p(out.data_ptr()), ctypes.c_uint32(out.stride(0))])
    return True


def try_transpose(codes: Tensor, out: Tensor) -> bool:
    """Write FP8 codes [N, K], contiguous, into `out` [K, N], where this can; returns whether it could."""
    rows, width = codes.shape
    kernel = _kernel("transposed", out.get_device(), False, 64) if _suits(codes, (4, 16), (rows, width), out) else None
    if kernel is None:
        return False
    places = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, out)]
    numbers = [ctypes.c_uint32(number) for number in (rows, width, out.stride(0))]
    with torch.cuda.device(out.device):
        kernel(ceil_div(rows, 128) * ceil_div(width, 128), 256, [*places, *numbers])
    return True
