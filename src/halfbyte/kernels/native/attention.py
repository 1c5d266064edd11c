"""C: attention over documents that may share a prompt, and its backward, in fp32; equal bits for any thread count."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import Scores, Spans, attention, attention_backward
from . import library

SIZES, MOST_SIZE = 16, 256  # head sizes are multiples of the first, up to the second

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Rows(ctypes.Structure):
    """`rows_in` of native/attention.c."""

    _fields_ = (("at", _pointer), ("row", _int64), ("head", _int64))

    @classmethod
    def of(cls, x: Tensor) -> _Rows:
        """Pointer and strides of x [N, H, D]."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


class _Attention(ctypes.Structure):
    """`attention` of native/attention.c."""

    _fields_ = (
        *[(name, _Rows) for name in ("q", "k", "v", "o", "dout")],
        *[(name, _pointer) for name in ("out", "logsumexp", "dq", "dk", "dv", "sums")],
        *[(name, _pointer) for name in ("begins", "lasts", "openings", "closings")],
        *[(name, _int64) for name in ("tokens", "skipped", "heads", "kv_heads", "size")],
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
        *[(name, _pointer) for name in ("trees", "count", "failed")],  # set in C; `count` is an int64
    )


_lib = library("attention")
for _function in (_lib.halfbyte_attention, _lib.halfbyte_attention_backward):
    _function.argtypes, _function.restype = [_pointer], ctypes.c_int


def obstacle(
    query: Tensor, key: Tensor, value: Tensor, documents: Spans, scores: Scores, sinks: Tensor | None = None, *_: Any
) -> str | None:
    if query.dtype is not torch.float32:
        return "takes fp32"
    if scores.window is not None or scores.softcap is not None or sinks is not None:
        return "has no windows, caps and sinks"
    fits = query.shape[2] <= MOST_SIZE and not query.shape[2] % SIZES
    return None if fits else f"needs heads in multiples of {SIZES}, up to {MOST_SIZE}"


def obstacle_backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *options: Any
) -> str | None:
    return obstacle(query, key, value, *options)


def _run(
    function: Callable[..., int], query: Tensor, key: Tensor, documents: Spans, scale: float, prompts: Spans | None,
    **fields: Any,
) -> None:  # fmt: skip
    """Run one of the library's functions; `fields` are rows and pointers of the struct."""
    bounds = [tensor.int().contiguous() for tensor in (*documents, *(prompts or ()))]
    named = zip(("begins", "lasts", "openings", "closings"), map(Tensor.data_ptr, bounds), strict=False)
    tokens, skipped = key.shape[0], key.shape[0] - query.shape[0]
    sizes = {"heads": query.shape[1], "kv_heads": key.shape[1], "size": query.shape[2]}
    call = _Attention(
        **fields, **dict(named), **sizes, tokens=tokens, skipped=skipped, scale=scale, threads=torch.get_num_threads()
    )
    if function(ctypes.byref(call)):
        raise MemoryError("there is no memory for a block of attention")


@attention.kernel("cpu", unless=obstacle)
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Spans,
    scores: Scores,
    sinks: Tensor | None = None,
    prompts: Spans | None = None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty(query.shape, dtype=torch.float32)
    logsumexp = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32)
    rows = {name: _Rows.of(x) for name, x in (("q", query), ("k", key), ("v", value))}
    results = {"out": out.data_ptr(), "logsumexp": logsumexp.data_ptr()}
    _run(_lib.halfbyte_attention, query, key, documents, scores.scale, prompts, **rows, **results)
    return out, logsumexp


@attention_backward.kernel("cpu", unless=obstacle_backward)
def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Spans,
    scores: Scores,
    sinks: Tensor | None = None,
    prompts: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32) for x in (query, key, value))
    operands = (("q", query), ("k", key), ("v", value), ("o", out), ("dout", dout))
    rows = {name: _Rows.of(x) for name, x in operands}
    pointers = {name: x.data_ptr() for name, x in (("sums", logsumexp), ("dq", dq), ("dk", dk), ("dv", dv))}
    _run(_lib.halfbyte_attention_backward, query, key, documents, scores.scale, prompts, **rows, **pointers)
    return dq, dk, dv, None
