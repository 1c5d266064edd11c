"""C: combination of the experts' outputs, summed in fp32 and in order."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...ops.experts import Routing, combine
from ..tiling import ceil_div
from . import library, parallel
from .blockwise4 import DTYPES

GRAIN = 1 << 14  # least values per thread

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Combine(ctypes.Structure):
    """`combine_job` of native/experts.c."""

    _fields_ = (
        *[(name, _pointer) for name in ("rows", "place", "weights", "out")],
        *[(name, _int64) for name in ("width", "top_k")],
        ("dtype", ctypes.c_int32),
    )


_lib = library("experts")
_lib.halfbyte_combine.argtypes, _lib.halfbyte_combine.restype = [_pointer, _int64, _int64], None


def obstacle(rows: Tensor, routing: Routing, weights: Tensor | None) -> str | None:
    return None if rows.dtype in DTYPES and rows.numel() else "takes fp32, bf16 and fp16"


@combine.kernel("cpu", unless=obstacle)
def combined(rows: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    rows, row_of_slot = rows.contiguous(), routing.row_of_slot.int()
    factors = None if weights is None else weights.float().contiguous()
    out = torch.empty(rows.shape[0] // routing.top_k, rows.shape[1], dtype=rows.dtype)
    pointers: list[Any] = [rows.data_ptr(), row_of_slot.data_ptr(), None if factors is None else factors.data_ptr()]
    job = _Combine(*pointers, out.data_ptr(), rows.shape[1], routing.top_k, DTYPES[rows.dtype])
    address, values_per_token = ctypes.addressof(job), rows.shape[1] * routing.top_k
    parallel(
        lambda first, last: _lib.halfbyte_combine(address, first, last), out.shape[0], ceil_div(GRAIN, values_per_token)
    )
    return out
