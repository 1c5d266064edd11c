"""C: GEMV of a few rows with a 4-bit weight, straight from the codes. A row's sums do not depend on the others."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ops.codebooks import codebook4
from ...ops.gemv4 import add_term, linear_blockwise4
from . import library
from .blockwise4 import CPU

GEMV_ROWS = 4  # of a call
ROWS = 16  # beyond, dequantizing costs less; up to there it costs 1 to 4 times as much in fp32

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class Weight(ctypes.Structure):
    """`weight4` of native/decode4.c. What it points to must outlive it."""

    _fields_ = (
        *[(name, _pointer) for name in ("packed", "absmax", "second", "code", "codebook", "bias", "up")],
        *[(name, _int64) for name in ("rows", "columns", "blocksize", "begin", "rank")],
        ("offset", ctypes.c_float),
    )


lib = library("decode4")
lib.halfbyte_gemv4.argtypes = [_pointer] * 3 + [ctypes.c_int] * 2
lib.halfbyte_gemv4.restype = ctypes.c_int


def obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Any, blocksize: int, *_: Any) -> str | None:
    suits = 1 <= x.shape[0] <= ROWS and not x.shape[1] % blocksize
    return None if suits else "takes 1 to 16 rows, of whole blocks"


@linear_blockwise4.kernel("cpu", unless=obstacle)
def gemv(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
    term: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    batch, columns = x.shape
    exact, y = x.float().contiguous(), torch.empty(batch, rows)
    packed, absmax, codebook = packed.contiguous(), absmax.contiguous(), codebook4(quant_type, CPU)
    weight = Weight(packed.data_ptr(), absmax.data_ptr(), codebook=codebook.data_ptr(), rows=rows, columns=columns,
                    blocksize=blocksize)  # fmt: skip
    if nested is not None:
        second, code = nested[0].contiguous(), nested[1].contiguous()  # named, so that they outlive the call
        weight.second, weight.code, weight.offset = second.data_ptr(), code.data_ptr(), float(nested[2])
    for some, out in zip(exact.split(GEMV_ROWS), y.split(GEMV_ROWS), strict=True):
        threads = torch.get_num_threads()
        if lib.halfbyte_gemv4(ctypes.byref(weight), some.data_ptr(), out.data_ptr(), len(some), threads):
            raise MemoryError(f"gemv4: no memory for {len(some)} rows of {columns} values")
    if bias is not None:
        y += bias
    return add_term(y.to(x.dtype), term)
