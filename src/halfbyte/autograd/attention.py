"""Causal attention with torch's forwards and backwards that repeat their bits.

torch's own backwards on CUDA, FlashAttention 2's and cuDNN's, add to dq by atomics. `varying` has FlashAttention's
forward and the two passes of `ops.attention`; `whole` has cuDNN's forward and cuDNN's own repeatable backward, which
torch does not ask for, by way of the package nvidia-cudnn-frontend.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from ..ops.attention import Spans, attention_backward, cudnn, rows_backward
from .function import OnceFunction

DTYPES = (torch.float16, torch.bfloat16)
WIDEST = 128  # width of a head that was measured
SHORT, MANY = 1024, 32  # tokens of a row; heads


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_documents(query: Tensor) -> bool:
    """Whether `varying` is for these [N, Hq, D], on Hopper: it costs nothing.

    H200, heads of 128, µs of backward, beside FlashAttention 2's own: 8,192 tokens of 32/8 heads in documents of 1,024
    906 (919), of 200 to 1,100 781 (794), of 40 to 300 496 (565); 1,024 tokens of 16/8 heads 57 (64).
    """
    return query.shape[-1] <= WIDEST and query.dtype in DTYPES and _has_triton()


def takes_rows(query: Tensor) -> bool:
    """Whether `whole` is for these [B, Hq, T, D], on Hopper: where it is asked for, or costs at most 1% of a step.

    What it adds to cuDNN's other backward on an H200, a layer: 65 µs at 4×2048 of 32/8 heads, 0.45% of an 8B's step;
    1.3 at 2×512 of 16/8 heads, 0.2% of a 0.6B's; 34 at 4×2048 of 16/8, above 1% of a 0.6B's; 368 at 1×8192 of 32/8,
    2.2% of an 8B's. Without NVIDIA's package it is Triton's two passes, 3.4% at 4×2048 of 32/8.
    """
    if query.shape[-1] > WIDEST or query.dtype not in DTYPES or not _has_triton():
        return False
    _, heads, length, _ = query.shape
    cheap = length <= SHORT or (length <= 2 * SHORT and heads >= MANY)
    return torch.are_deterministic_algorithms_enabled() or (cheap and cudnn() is not None)


class _Varying(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, bounds, longest, documents, scale, window):
        places, sides = (bounds, bounds, longest, longest), (-1 if window is None else window - 1, 0)
        out, logsumexp = torch.ops.aten._flash_attention_forward(
            query, key, value, *places, 0.0, True, False,
            scale=scale, window_size_left=sides[0], window_size_right=sides[1],
        )[:2]  # fmt: skip
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = documents, scale, window
        return out

    @staticmethod
    def backward(ctx, grad):
        gradients = attention_backward(_dense(grad), *ctx.saved_tensors, *ctx.options)
        return *gradients, None, None, None, None, None


class _Whole(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, scale):
        options = True, 0.0, True, False
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, *options, scale=scale)
        out, logsumexp = found[:2]
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        return *rows_backward(_dense(grad), *ctx.saved_tensors, ctx.scale), None


def _dense(grad: Tensor) -> Tensor:
    """The gradient with the elements of a head side by side, where kernels ask for that."""
    return grad if grad.stride(-1) == 1 and 0 not in grad.stride() else grad.contiguous()


def varying(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    documents: Spans,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attention within documents of flat rows.

    Args:
        query: [N, Hq, D], fp16 or bf16; key, value: [N, Hk, D].
        bounds, longest: as `models.attention.documents` gives them.
        documents: `ops.attention.spans` of the bounds.
        scale: of the scores.
        window: tokens that a token sees, itself among them; None: all.

    Returns:
        [N, Hq, D].
    """
    return _Varying.apply(query, key, value, bounds, longest, documents, scale, window)


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention in which every row is one document: query [B, Hq, T, D], key and value [B, Hk, T, D] → [B, Hq, T, D].

    Where `takes_rows` says so.
    """
    return _Whole.apply(query, key, value, scale)
