"""C: sampling of a token per row with its log-probability, in two passes over the logits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.sample import draw_tokens
from . import library

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64


class _Sampler(ctypes.Structure):
    """`sampler` of native/sample.c."""

    _fields_ = (
        *[(name, _pointer) for name in ("logits", "places", "kept", "tokens", "log_probs")],
        *[(name, _int64) for name in ("rows", "vocabulary", "seed")],
        ("temperature", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


lib = library("sample")
lib.halfbyte_sample.argtypes, lib.halfbyte_sample.restype = [_pointer], None


@draw_tokens.kernel("cpu")
def draw(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    logits, positions = logits.float().contiguous(), positions.contiguous()
    allowed = None if allowed is None else allowed.contiguous()
    tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    pointers = [
        None if tensor is None else tensor.data_ptr() for tensor in (logits, positions, allowed, tokens, log_probs)
    ]
    call = _Sampler(*pointers, rows, vocabulary, int(seed), temperature, torch.get_num_threads())
    lib.halfbyte_sample(ctypes.byref(call))
    return tokens, log_probs
