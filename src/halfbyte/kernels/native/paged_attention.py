"""C: attention over pages, computed in fp32 for any cache dtype. A sequence's result does not depend on the others."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.paged_attention import Shared, paged_attention
from . import library
from .decode4 import CACHES

MOST_SIZE = 256  # largest head

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Paged(ctypes.Structure):
    """`paged` of native/paged_attention.c."""

    _fields_ = (
        *[(name, _pointer) for name in ("q", "out", "keys", "values", "tables", "lengths", "sinks")],
        *[(name, _int64) for name in ("stride", "rows", "heads", "kv_heads", "size", "window")],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        *[(name, ctypes.c_int32) for name in ("bf16", "threads")],
    )


lib = library("paged_attention")
lib.halfbyte_paged_attention.argtypes, lib.halfbyte_paged_attention.restype = [_pointer], None


def obstacle(q: Tensor, keys: Tensor, *_: object) -> str | None:
    if keys.dtype not in CACHES:
        return "takes a cache in fp32 or bf16"
    fits = q.shape[2] <= MOST_SIZE and not q.shape[2] % CACHES[keys.dtype]
    return None if fits else f"needs heads in multiples of {CACHES[keys.dtype]}, up to {MOST_SIZE}"


@paged_attention.kernel("cpu", unless=obstacle)
def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    exact = q.float().contiguous()
    tables = tables.contiguous()
    lengths = lengths.contiguous()
    out, sinks = torch.empty_like(exact), None if sinks is None else sinks.float().contiguous()
    pointers = [tensor.data_ptr() for tensor in (exact, out, keys, values, tables, lengths)]
    pointers.append(0 if sinks is None else sinks.data_ptr())
    sizes = tables.shape[1], *q.shape[:2], keys.shape[1], q.shape[2], window or 0
    half = keys.dtype is torch.bfloat16
    call = _Paged(*pointers, *sizes, scale, softcap or 0.0, half, torch.get_num_threads())
    lib.halfbyte_paged_attention(ctypes.byref(call))
    return out.to(q.dtype)
