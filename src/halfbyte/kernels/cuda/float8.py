"""`cuda/float8.cu`: conversion of 4-bit weights to E4M3 in either orientation.

Measured on an H200, average over the weights of an 8B model: 19 µs transposed and 17 straight; Triton takes 55 and 49.

FP8 GEMMs on GPUs with FP8 units are torch._scaled_mm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...formats.codebooks import codebook4
from ...formats.float8 import E4M3
from ...ops.float8 import emulated, float8_of_blockwise4, fp8_product
from ...utils.notices import notice
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered


class Weight(ctypes.Structure):
    """The struct of this name in `cuda/float8.cu`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "absmax", "second", "code", "offset", "codebook", "factor")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    ]


Nested = tuple[Tensor, Tensor, Tensor] | None


@remembered
def _kernel(name: str, device: int, nested: bool, blocksize: int) -> Kernel:
    constants = {"NESTED": int(nested), "SHIFT": blocksize.bit_length() - 1}
    return Kernel(cubin("float8", device_at(device).capability, constants, [Weight]), name)


def _launch(
    name: str, nested: bool, blocksize: int, blocks: int, threads: int, arguments: Sequence, out: Tensor
) -> None:
    with torch.cuda.device(out.get_device()):
        _kernel(name, out.get_device(), nested, blocksize)(blocks, threads, arguments)


def _obstacle(tensor: Tensor, shape: tuple[int, int], columns: int, out: Tensor | None, stride: int) -> str | None:
    """Return why `tensor` [N, K] is not supported, or None. K must be a multiple of `columns`; `stride` is the result's
    row stride without `out`."""
    if not device_of(tensor).at_least(HOPPER):  # griddepcontrol
        return NEEDS_HOPPER
    stride, address = (stride, 0) if out is None else (out.stride(0), out.data_ptr())
    if shape[0] % 4 or shape[1] % columns or stride % 16 or (tensor.data_ptr() | address) % 16:
        return f"needs N in fours, K in multiples of {columns}, and rows of results at multiples of 16 bytes"
    return None


def weight_obstacle(
    packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, shape: tuple[int, int],
    factor: Tensor, transposed: bool = False, out: Tensor | None = None,
) -> str | None:  # fmt: skip
    if blocksize < 32:
        return "needs blocks of 32 and more"
    return _obstacle(packed, shape, 32, out, shape[0] if transposed else shape[1])


@float8_of_blockwise4.kernel("cuda", unless=weight_obstacle, rank=1)
def of_blockwise4(
    packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, shape: tuple[int, int],
    factor: Tensor, transposed: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, width = shape
    if out is None:
        out = torch.empty((width, rows) if transposed else shape, dtype=E4M3, device=packed.device)
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    tensors = packed, absmax, second, code, offset, codebook4(quant_type, packed.device), factor
    threads = 128 if transposed else 256
    blocks = ceil_div(rows, 128) * ceil_div(width, 128) if transposed else ceil_div(rows * width // 16, threads)
    weight = Weight(*[tensor.data_ptr() for tensor in tensors], rows, width)
    arguments = [weight, ctypes.c_void_p(out.data_ptr()), ctypes.c_uint32(out.stride(0))]
    _launch(
        "to_e4m3_transposed" if transposed else "to_e4m3",
        nested is not None,
        blocksize,
        blocks,
        threads,
        arguments,
        out,
    )
    return out


MULTIPLE = 16  # of the sizes of an FP8 GEMM


def scaled_mm_obstacle(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *_: Any) -> str | None:
    needed = (9, 0) if b_scale.dim() else (8, 9)  # scales per row: Hopper and later
    if not device_of(a).at_least(needed):
        return f"{a.device.type} has no FP8 units that torch multiplies with"
    if a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        return f"{a.shape[1]} and {b.shape[0]} are not both multiples of {MULTIPLE}, as FP8 products need"
    return None


@fp8_product.kernel("cuda", unless=scaled_mm_obstacle, rank=1)
def scaled_mm(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    if b_scale.dim():
        a_scale, b_scale = a_scale.expand(a.shape[0], 1).contiguous(), b_scale.view(1, -1)
    result = out if out.dtype is torch.bfloat16 else torch.empty_like(out, dtype=torch.bfloat16)
    torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast, out=result)
    if result is not out:
        out.copy_(result)


@fp8_product.kernel("cuda", rank=2)
def emulate(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out: Tensor, fast: bool) -> None:
    why = scaled_mm_obstacle(a, b, a_scale, b_scale)
    notice("fp8-product-cuda", f"{why}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    emulated(a, b, a_scale, b_scale, out)
