"""C: k-bit and HQQ weights in bit planes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...formats.bitplane import BLOCK, TINY, dequantize_bitplane, e4m4_decode, quantize_bitplane, steps_of
from ...formats.hqq import dequantize_hqq
from . import library, parallel

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRAIN = 1 << 11  # least blocks per thread

_lib = library("bitplane")
_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64
_int = ctypes.c_int
_lib.halfbyte_dequantize_planes.argtypes = [
    _pointer,
    _int,
    _pointer,
    _int64,
    *[_pointer] * 2,
    _int64,
    _pointer,
    *[_int64] * 4,
    _int,
]
_lib.halfbyte_quantize_planes.argtypes = [*[_pointer] * 4, _int, _pointer, _int64, _int64, _int]
_lib.halfbyte_dequantize_planes.restype = _lib.halfbyte_quantize_planes.restype = None


def decode(
    packed: Tensor,
    bits: int,
    codebook: Tensor | None,
    scales: Tensor,
    zeros: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize to `dtype` [rows, width]: (codebook[code] − zero) · scale, without a codebook (code − zero) · scale.

    Args:
        packed: int32, planes of `bits`-bit codes in rows of whole groups.
        codebook: fp32 [2^bits], or [E, 2^bits] for E equal runs of rows.
        scales, zeros: fp32 [groups].
    """
    out = torch.empty(rows, width, dtype=dtype)
    blocks = packed.numel() // bits
    if not blocks:
        return out
    packed = packed.contiguous()
    scales = scales.contiguous()
    zeros = zeros.contiguous()
    run = blocks
    if codebook is not None:  # the C code uses a table of fixed size
        run = blocks // (len(codebook) if codebook.dim() > 1 else 1)
        codebook = torch.nn.functional.pad(codebook, (0, BLOCK - codebook.shape[-1])).contiguous()

    def some(first: int, last: int) -> None:
        _lib.halfbyte_dequantize_planes(
            packed.data_ptr(), bits, None if codebook is None else codebook.data_ptr(), run, scales.data_ptr(),
            zeros.data_ptr(), blocks // scales.numel(), out.data_ptr(), width, blocks // rows, first, last,
            DTYPES[dtype],
        )  # fmt: skip

    parallel(some, blocks, GRAIN)
    return out


@dequantize_bitplane.kernel("cpu")
def dequantize(
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    factor: Tensor,
    codebook: Tensor,
    rows: int,
    width: int,
    dtype: torch.dtype,
) -> Tensor:
    steps = steps_of(scales, factor)
    k = codebook.shape[-1].bit_length() - 1
    return decode(packed, k, codebook, steps, _zeros(zeros, steps), rows, width, dtype)


@quantize_bitplane.kernel("cpu")
def quantize(blocks: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor) -> Tensor:
    k = codebook.numel().bit_length() - 1
    blocks, midpoints = blocks.contiguous(), (codebook[:-1] + codebook[1:]) / 2
    steps = (e4m4_decode(scales) * factor).clamp(min=TINY)
    offsets = _zeros(zeros, steps)
    packed = torch.empty(scales.numel() * k, dtype=torch.int32)

    def some(first: int, last: int) -> None:
        _lib.halfbyte_quantize_planes(
            blocks.data_ptr(), steps.data_ptr(), offsets.data_ptr(), midpoints.data_ptr(), k, packed.data_ptr(),
            first, last, DTYPES[blocks.dtype],
        )  # fmt: skip

    parallel(some, blocks.numel() // BLOCK, GRAIN)
    return packed


def _zeros(zeros: Tensor | None, steps: Tensor) -> Tensor:
    return torch.zeros_like(steps) if zeros is None else zeros.float()


@dequantize_hqq.kernel("cpu")
def dequantize_groups(
    packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, width: int, dtype: torch.dtype
) -> Tensor:
    return decode(packed, bits, None, scales.float(), zeros.float(), rows, width, dtype)
