"""C: quantization and dequantization of 4-bit weights in one pass over memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...formats.blockwise4 import dequantize_blockwise4, quantize_blockwise4
from ...formats.codebooks import codebook4, thresholds4
from . import library, parallel

CPU = torch.device("cpu")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GRAIN = 1 << 16  # least values per thread

_lib = library("blockwise4")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
_lib.halfbyte_dequantize4.argtypes = [_pointer] * 4 + [ctypes.c_float] + [_pointer] * 2 + [_int64] * 4 + [ctypes.c_int]
_lib.halfbyte_quantize4.argtypes = [_pointer] * 5 + [_int64] * 4 + [ctypes.c_int]
_lib.halfbyte_dequantize4.restype = _lib.halfbyte_quantize4.restype = None


@dequantize_blockwise4.kernel("cpu")
def dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(numel, dtype=dtype)
    packed = packed.contiguous()
    absmax = absmax.contiguous()
    codebook = codebook4(quant_type, CPU)
    second_pointer = None
    code_pointer = None
    value = 0.0
    if nested is not None:
        second, code = nested[0].contiguous(), nested[1].contiguous()  # keep references during the call
        second_pointer = second.data_ptr()
        code_pointer = code.data_ptr()
        value = float(nested[2])

    def blocks(first: int, last: int) -> None:
        _lib.halfbyte_dequantize4(
            packed.data_ptr(), absmax.data_ptr(), second_pointer, code_pointer, value, codebook.data_ptr(),
            out.data_ptr(), numel, blocksize, first, last, DTYPES[dtype],
        )  # fmt: skip

    parallel(blocks, absmax.numel(), GRAIN // blocksize)
    return out


@quantize_blockwise4.kernel("cpu")
def quantize(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    numel = weight.numel()
    packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8)
    absmax = torch.empty(-(-numel // blocksize), dtype=torch.float32)
    midpoints, code_of_rank = thresholds4(quant_type, CPU)
    code_of_rank = code_of_rank.int()

    def blocks(first: int, last: int) -> None:
        _lib.halfbyte_quantize4(
            weight.data_ptr(), packed.data_ptr(), absmax.data_ptr(), midpoints.data_ptr(), code_of_rank.data_ptr(),
            numel, blocksize, first, last, DTYPES[weight.dtype],
        )  # fmt: skip

    parallel(blocks, absmax.numel(), GRAIN // blocksize)
    return packed, absmax
