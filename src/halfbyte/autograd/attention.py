"""Causal attention without a mask, and who computes it: of whole rows cuDNN, of documents in flat rows FlashAttention.

FlashAttention is version 3 where its package (`flash_attn_interface`) is installed, else torch's version 2.

torch's own backwards on CUDA, FlashAttention 2's and cuDNN's, add to dq by atomics, so two runs may differ in last
bits. On Hopper documents have FlashAttention's forward and the two passes of `ops.attention`, and rows cuDNN's forward
and its own repeatable backward, which torch does not ask for, by way of the package nvidia-cudnn-frontend.

Sinks and capped scores have a forward of ours, too (`scored`), which repeats everywhere.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..dispatch import on_compiler
from ..ops.attention import Branches, Scores, Spans, attention, attention_backward, cudnn, rows_backward, spans
from ..utils.notices import notice
from .function import OnceFunction

DIFFERS = "reproducible"  # the key of the notice that two runs may differ
HOPPER = 9
AMPERE = 8, 0  # the compute capability from which on FlashAttention runs
DTYPES = (torch.float16, torch.bfloat16)  # that the kernels know
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WIDEST = 128  # width of a head that was measured
SHORT, MANY = 1024, 32  # tokens of a row; heads


def capability(device: torch.device) -> tuple[int, int] | None:
    """A CUDA device's compute capability, of one that is not here `AMPERE`; None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else AMPERE


def is_hopper(device: torch.device) -> bool:
    """Whether the repeatable backwards were measured on such a device: what they cost elsewhere is not known."""
    found = capability(device)
    return found is not None and found[0] == HOPPER and torch.version.hip is None


def may_differ(query: Tensor, what: str) -> None:
    """Say once that two runs may not have equal bits, where that is so."""
    if query.is_cuda and torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled():
        notice(DIFFERS, f"two runs with one seed may differ in last bits: the backward of {what} adds in any order")


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def takes_documents(query: Tensor) -> bool:
    """Whether the repeatable backward is for these [N, Hq, D], on Hopper: it costs nothing.

    H200, heads of 128, µs of backward, beside FlashAttention 2's own: 8,192 tokens of 32/8 heads in documents of 1,024
    906 (919), of 200 to 1,100 781 (794), of 40 to 300 496 (565); 1,024 tokens of 16/8 heads 57 (64).
    """
    return query.shape[-1] <= WIDEST and query.dtype in DTYPES and _has_triton()


def takes_branches(query: Tensor) -> bool:
    """Whether `branching` is for these [N, Hq, D]: its kernels compile for NVIDIA's GPUs from Ampere on, and in float32
    for CPUs. Where AMD's FlashAttention puts queries that are fewer than their keys, nobody has looked."""
    if query.is_cpu:
        asked = attention.choices("cpu", query, query, query, (), Scores(1.0))
        return not on_compiler() and any(obstacle is None for _, obstacle in asked)
    found = capability(query.device)
    return found is not None and found >= AMPERE and torch.version.hip is None and takes_documents(query)


def takes_rows(query: Tensor) -> bool:
    """Whether the repeatable backward is for these [B, Hq, T, D], on Hopper: it is asked for, or costs at most 1% of a
    step.

    What it adds to cuDNN's other backward on an H200, a layer: 65 µs at 4×2048 of 32/8 heads, 0.45% of an 8B's step;
    1.3 at 2×512 of 16/8 heads, 0.2% of a 0.6B's; 34 at 4×2048 of 16/8, above 1% of a 0.6B's; 368 at 1×8192 of 32/8,
    2.2% of an 8B's. Without NVIDIA's package it is Triton's two passes, 3.4% at 4×2048 of 32/8.
    """
    if query.shape[-1] > WIDEST or query.dtype not in DTYPES or not _has_triton():
        return False
    _, heads, length, _ = query.shape
    cheap = length <= SHORT or (length <= 2 * SHORT and heads >= MANY)
    return torch.are_deterministic_algorithms_enabled() or (cheap and cudnn() is not None)


def takes_scores(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `scored` is for heads of this width: in 16 bits on NVIDIA's GPUs from Ampere on, and on AMD's.

    H200, 8,192 tokens, 16/8 heads of 256, a window of 4,096, capped, µs forward and backward: 1,494 and 6,820; tiles of
    queries (`tiled_attention`) 24,546 and 38,687, transformers' eager 19,458 and 21,875.
    """
    found = capability(device)
    if found is None or dtype not in DTYPES or width > 2 * WIDEST:
        return False
    return (found >= AMPERE or torch.version.hip is not None) and _has_triton()


class _Varying(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, bounds, longest, documents, scale, window):
        places, sides = (bounds, bounds, longest, longest), (-1 if window is None else window - 1, 0)
        out, logsumexp = torch.ops.aten._flash_attention_forward(
            query, key, value, *places, 0.0, True, False,
            scale=scale, window_size_left=sides[0], window_size_right=sides[1],
        )[:2]  # fmt: skip
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = documents, Scores(scale, window)
        return out

    @staticmethod
    def backward(ctx, grad):
        gradients = attention_backward(_dense(grad), *ctx.saved_tensors, *ctx.options)
        return *gradients[:3], None, None, None, None, None


class _Branching(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, branches, scale):
        # keys and values beside each document are made for this product alone: backward reads them in their place
        beside = [x.index_select(0, branches.places) for x in (key, value)]
        places = branches.bounds, branches.key_bounds, branches.longest, branches.longest_keys
        out, logsumexp = torch.ops.aten._flash_attention_forward(
            query, *beside, *places, 0.0, True, False, scale=scale
        )[:2]
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.branches, ctx.scale = branches, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        branches = ctx.branches
        how = branches.documents, Scores(ctx.scale), None, branches.prompts
        return *attention_backward(_dense(grad), *ctx.saved_tensors, *how)[:3], None, None


class _Scored(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, sinks, documents, scores, prompts):
        out, logsumexp = attention(query, key, value, documents, scores, sinks, prompts)
        ctx.save_for_backward(query, key, value, out, logsumexp, sinks)
        ctx.how, ctx.prompts = (documents, scores), prompts
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, sinks = ctx.saved_tensors
        asked = sinks if ctx.needs_input_grad[3] else None
        dq, dk, dv, dsinks = attention_backward(_dense(grad), *saved, *ctx.how, asked, ctx.prompts)
        return dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None, None, None


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


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention in which every row is one document.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, T, D].
        scale: of the scores; None: 1/√D.

    Returns:
        [B, Hq, T, D].
    """
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
    grouped = query.shape[1] != key.shape[1]
    if on_compiler():
        return attention(query, key, value, enable_gqa=grouped)
    if is_hopper(query.device) and takes_rows(query):
        return _Whole.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    may_differ(query, "cuDNN's attention of whole rows")
    with sdpa_kernel(BACKENDS, set_priority=True):
        return attention(query, key, value, enable_gqa=grouped)


def branching(query: Tensor, key: Tensor, value: Tensor, branches: Branches, scale: float | None) -> Tensor:
    """Causal attention of answers to the prompt that they share and to themselves, of those that `takes_branches`.

    On a GPU the forward is FlashAttention 2's, whose queries are the last ones of the keys that they are given. The
    rest is of `ops.attention`, in whose backward every sum has one order.

    Args:
        query: [N, Hq, D]; key, value: [N, Hk, D].
        scale: of the scores; None: 1/√D.

    Returns:
        [N, Hq, D].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cpu:
        return _Scored.apply(query, key, value, None, branches.documents, Scores(scale), branches.prompts)
    return _Branching.apply(query, key, value, branches, scale)


def scored(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Spans, scores: Scores) -> Tensor:
    """Causal attention within documents whose scores are capped, or have sinks, of those that `takes_scores`.

    Args:
        query: [N, Hq, D]; key, value: [N, Hk, D].
        sinks: [Hq]; None: there are none.
        documents: `ops.attention.spans`.

    Returns:
        [N, Hq, D].
    """
    return _Scored.apply(query, key, value, sinks, documents, scores, None)


@functools.cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def flash3() -> Callable[..., Any] | None:
    """FlashAttention 3's function for variable lengths; None where its package is not installed, or does not run."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9:
        notice("flash3", "FlashAttention 3 is installed and not used: it is made for Hopper GPUs")
        return None
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        notice("flash3", f"FlashAttention 3 is installed and not used: {error}")
        return None
    return flash_attn_varlen_func


def takes_caps(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention 3 is there for capped scores."""
    return capability(device) is not None and dtype in DTYPES and flash3() is not None


def varying(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Spans | None = None,
) -> Tensor:
    """Causal attention within documents.

    Args:
        query: [B·T, Hq, D]; key, value: [B·T, Hk, D].
        bounds: int32 [documents + 1], where each begins, as `modeling.attention.document_bounds` gives them.
        longest: at least the tokens of the longest document.
        scale: of the scores; None: 1/√D.
        window: tokens that a token sees, itself among them.
        softcap: scores become softcap · tanh(score / softcap); with FlashAttention 3 only.
        documents: `ops.attention.spans` of the bounds; None: worked out where it is needed.

    Returns:
        [B·T, Hq, D].
    """
    places = bounds, bounds, longest, longest
    sides = (-1 if window is None else window - 1, 0)
    flash = flash3()
    if flash is not None and not on_compiler():
        may_differ(query, "FlashAttention 3")
        exact = torch.are_deterministic_algorithms_enabled()
        options = {"softmax_scale": scale, "causal": True, "softcap": softcap or 0.0, "deterministic": exact}
        out = flash(query, key, value, *places, window_size=sides, **options)
        return out[0] if isinstance(out, tuple) else out  # earlier versions return the normalizers, too
    if not on_compiler() and is_hopper(query.device) and takes_documents(query):
        documents = documents or spans(bounds, query.shape[0])
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _Varying.apply(query, key, value, bounds, longest, documents, scale, window)
    may_differ(query, "FlashAttention 2")
    varlen_attn, parameters = _varlen()
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in parameters else {}
    return varlen_attn(query, key, value, *places, window_size=sides, scale=scale, **grouped)
