"""CPU twin of `halfbyte.ops.gemv4`: a few rows straight from the codes, in C; more go through dequantizing."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..ops.codebooks import codebook4
from ..ops.gemv4 import linear_blockwise4
from .blockwise4_cpu import CPU, GRAIN
from .native import library, parallel

GEMV_ROWS = 4

_lib = library("blockwise4")
_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
_lib.halfbyte_gemv4.argtypes = [_pointer] * 4 + [ctypes.c_float] + [_pointer] * 3 + [_int64] * 5 + [ctypes.c_int]
_lib.halfbyte_gemv4.restype = None


@linear_blockwise4.twin("cpu")
def linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    batch, columns = x.shape
    if not 1 <= batch <= GEMV_ROWS or columns % blocksize:
        return linear_blockwise4.reference(x, packed, absmax, nested, blocksize, quant_type, rows, bias)
    exact, y = x.float().contiguous(), torch.empty(batch, rows)
    packed, absmax, codebook = packed.contiguous(), absmax.contiguous(), codebook4(quant_type, CPU)
    second_pointer, code_pointer, value = None, None, 0.0
    if nested is not None:
        second, code = nested[0].contiguous(), nested[1].contiguous()  # named, so that they outlive the call
        second_pointer, code_pointer, value = second.data_ptr(), code.data_ptr(), float(nested[2])

    def some(first: int, last: int) -> None:
        _lib.halfbyte_gemv4(
            packed.data_ptr(), absmax.data_ptr(), second_pointer, code_pointer, value, codebook.data_ptr(),
            exact.data_ptr(), y.data_ptr(), rows, columns, blocksize, first, last, batch,
        )  # fmt: skip

    parallel(some, rows, max(4 * GRAIN // columns, 1))
    if bias is not None:
        y += bias
    return y.to(x.dtype)
