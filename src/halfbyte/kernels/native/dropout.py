"""C: dropout with masks from a seed and an element's position, in one pass over memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.dropout import Dropout, drop
from . import library, parallel
from .blockwise4 import DTYPES

GRAIN = 1 << 14  # least values per thread


class _Job(ctypes.Structure):
    """`dropout_job` of native/dropout.c."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("first_column", ctypes.c_uint32),
        ("threshold", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


_lib = library("dropout")
_lib.halfbyte_dropout.argtypes, _lib.halfbyte_dropout.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None


def obstacle(x: Tensor, dropout: Dropout, rows: Tensor | None = None) -> str | None:
    if x.dtype not in DTYPES or not x.numel():
        return "takes fp32, bf16 and fp16"
    return None if x.stride(1) == 1 else "needs values of a row side by side"


@drop.kernel("cpu", unless=obstacle)
def forward(x: Tensor, dropout: Dropout, rows: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    mask_rows = None if rows is None else rows.int().contiguous()
    count, columns = x.shape
    job = _Job(
        x.data_ptr(), None if mask_rows is None else mask_rows.data_ptr(), out.data_ptr(), columns, x.stride(0),
        int(dropout.seeds[0]), dropout.first_column, dropout.threshold, dropout.scale, DTYPES[x.dtype],
    )  # fmt: skip
    address = ctypes.addressof(job)
    parallel(lambda first, last: _lib.halfbyte_dropout(address, first, last), count, max(GRAIN // columns, 1))
    return out
