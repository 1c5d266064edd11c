"""Causal attention without a mask, and the choice of its kernel: cuDNN for full rows, FlashAttention for packed rows.

FlashAttention is version 3 if its package (`flash_attn_interface`) is installed, otherwise torch's version 2.

torch's backward kernels on CUDA, FlashAttention 2 and cuDNN, accumulate dq with atomics, so the last bits of two runs
may differ. On Hopper, packed documents use FlashAttention's forward and the deterministic two-pass backward of
`ops.attention`; full rows use cuDNN's forward and its deterministic backward. torch does not expose the latter, so it
is called through the package nvidia-cudnn-frontend.

Attention with sinks or softcapped scores uses the kernels of `ops.attention` in both passes (`score_mod_attention`).
These are deterministic on every device.
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

DIFFERS = "reproducible"  # key of the notice that two runs may differ
HOPPER = 9  # major compute capability
AMPERE = 8, 0  # lowest compute capability of FlashAttention
DTYPES = (torch.float16, torch.bfloat16)  # dtypes of the kernels
BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
WIDEST = 128  # largest head width that was measured
SHORT, MANY = 1024, 32  # tokens of a row and number of heads, for `has_repeatable_rows`


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, `AMPERE` if this machine has none; None for other devices."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else AMPERE


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, on which the deterministic backward kernels were measured."""
    version = capability(device)
    return version is not None and version[0] == HOPPER and torch.version.hip is None


def warn_unrepeatable(query: Tensor, kernel_name: str) -> None:
    """Notify once that results are not bit-reproducible, if a backward of `kernel_name` on `query`'s device follows."""
    if query.is_cuda and torch.is_grad_enabled() and not torch.are_deterministic_algorithms_enabled():
        notice(
            DIFFERS,
            f"two runs with one seed may differ in the last bits: the backward of {kernel_name} accumulates atomically",
        )


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_repeatable_varlen(query: Tensor) -> bool:
    """Whether packed documents with queries [N, Hq, D] use the deterministic backward on Hopper.

    It is not slower than FlashAttention 2's backward. On an H200 with heads of 128, µs (FlashAttention 2 in
    parentheses): 8,192 tokens of 32/8 heads in documents of 1,024 tokens 906 (919), of 200 to 1,100 tokens 781 (794),
    of 40 to 300 tokens 496 (565); 1,024 tokens of 16/8 heads 57 (64).
    """
    return query.shape[-1] <= WIDEST and query.dtype in DTYPES and _has_triton()


def supports_shared_prefix(query: Tensor) -> bool:
    """Whether `shared_prefix_attention` supports queries [N, Hq, D].

    It does on NVIDIA GPUs from Ampere on, in 16 bits, and on CPUs in float32. AMD GPUs are excluded: how their
    FlashAttention aligns fewer queries than keys is untested.
    """
    if query.is_cpu:
        kernels = attention.choices("cpu", query, query, query, (), Scores(1.0))
        return not on_compiler() and any(obstacle is None for _, obstacle in kernels)
    version = capability(query.device)
    return version is not None and version >= AMPERE and torch.version.hip is None and has_repeatable_varlen(query)


def has_repeatable_rows(query: Tensor) -> bool:
    """Whether full rows with queries [B, Hq, T, D] use the deterministic backward on Hopper.

    True if deterministic algorithms are requested or the backward adds at most 1% to a step. Measured additional time
    per layer over cuDNN's default backward on an H200: 65 µs at 4×2048 tokens and 32/8 heads (0.45% of a step of an 8B
    model); 1.3 µs at 2×512 and 16/8 (0.2% of a 0.6B); 34 µs at 4×2048 and 16/8 (above 1% of a 0.6B); 368 µs at 1×8192
    and 32/8 (2.2% of an 8B). Without nvidia-cudnn-frontend, Triton's two passes add 3.4% at 4×2048 and 32/8.
    """
    if query.shape[-1] > WIDEST or query.dtype not in DTYPES or not _has_triton():
        return False
    _, heads, length, _ = query.shape
    cheap = length <= SHORT or (length <= 2 * SHORT and heads >= MANY)
    return torch.are_deterministic_algorithms_enabled() or (cheap and cudnn() is not None)


def supports_scores(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `score_mod_attention` supports heads of this width.

    It does in 16 bits on NVIDIA GPUs from Ampere on and on AMD GPUs. On an H200 with 8,192 tokens, 16/8 heads of 256, a
    window of 4,096 and a softcap, µs of forward and backward: 1,494 and 6,820; `tiled_attention` 24,546 and 38,687;
    transformers' eager attention 19,458 and 21,875.
    """
    version = capability(device)
    if version is None or dtype not in DTYPES or width > 2 * WIDEST:
        return False
    return (version >= AMPERE or torch.version.hip is not None) and _has_triton()


class _VarlenAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, bounds, longest, documents, scale, window):
        out, logsumexp = torch.ops.aten._flash_attention_forward(
            query, key, value, bounds, bounds, longest, longest, 0.0, True, False,
            scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[:2]  # fmt: skip
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = documents, Scores(scale, window)
        return out

    @staticmethod
    def backward(ctx, grad):
        gradients = attention_backward(_dense(grad), *ctx.saved_tensors, *ctx.options)
        return *gradients[:3], None, None, None, None, None


class _SharedPrefixAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, branches, scale):
        # Copies of the prompt's keys and values next to each answer's; the backward reads the originals.
        copies = [x.index_select(0, branches.attended) for x in (key, value)]
        lengths = branches.bounds, branches.key_bounds, branches.longest, branches.longest_keys
        out, logsumexp = torch.ops.aten._flash_attention_forward(
            query, *copies, *lengths, 0.0, True, False, scale=scale
        )[:2]
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.branches, ctx.scale = branches, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        branches = ctx.branches
        options = branches.documents, Scores(ctx.scale), None, branches.prompts
        return *attention_backward(_dense(grad), *ctx.saved_tensors, *options)[:3], None, None


class _ScoredAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, sinks, documents, scores, prompts):
        out, logsumexp = attention(query, key, value, documents, scores, sinks, prompts)
        ctx.save_for_backward(query, key, value, out, logsumexp, sinks)
        ctx.options, ctx.prompts = (documents, scores), prompts
        return out

    @staticmethod
    def backward(ctx, grad):
        *saved, sinks = ctx.saved_tensors
        trained = sinks if ctx.needs_input_grad[3] else None
        dq, dk, dv, dsinks = attention_backward(_dense(grad), *saved, *ctx.options, trained, ctx.prompts)
        return dq, dk, dv, None if dsinks is None else dsinks.to(sinks.dtype), None, None, None


class _CudnnAttention(OnceFunction):
    @staticmethod
    def forward(ctx, query, key, value, scale):
        options = True, 0.0, True, False
        results = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, *options, scale=scale)
        out, logsumexp = results[:2]
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        return *rows_backward(_dense(grad), *ctx.saved_tensors, ctx.scale), None


def _dense(grad: Tensor) -> Tensor:
    """The gradient with last stride 1 and no expanded dimensions, as the kernels require."""
    return grad if grad.stride(-1) == 1 and 0 not in grad.stride() else grad.contiguous()


def row_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention in which every row is one document.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, T, D].
        scale: factor of the scores; None: 1/√D.

    Returns:
        [B, Hq, T, D].
    """
    attention = functools.partial(F.scaled_dot_product_attention, is_causal=True, scale=scale)
    grouped = query.shape[1] != key.shape[1]
    if on_compiler():
        return attention(query, key, value, enable_gqa=grouped)
    if is_hopper(query.device) and has_repeatable_rows(query):
        return _CudnnAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    warn_unrepeatable(query, "cuDNN's attention")
    with sdpa_kernel(BACKENDS, set_priority=True):
        return attention(query, key, value, enable_gqa=grouped)


def shared_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, branches: Branches, scale: float | None
) -> Tensor:
    """Causal attention of answers to their shared prompt and to themselves; see `supports_shared_prefix` for support.

    On a GPU the forward is FlashAttention 2, which aligns queries with the last keys of each document. The backward is
    the deterministic one of `ops.attention`. On a CPU both are of `ops.attention`.

    Args:
        query: [N, Hq, D]; key, value: [N, Hk, D].
        branches: the tree of prompts and answers.
        scale: factor of the scores; None: 1/√D.

    Returns:
        [N, Hq, D].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.is_cpu:
        return _ScoredAttention.apply(query, key, value, None, branches.documents, Scores(scale), branches.prompts)
    return _SharedPrefixAttention.apply(query, key, value, branches, scale)


def score_mod_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, documents: Spans, scores: Scores
) -> Tensor:
    """Causal attention within documents with softcapped scores or sinks; see `supports_scores` for support.

    Args:
        query: [N, Hq, D]; key, value: [N, Hk, D].
        sinks: [Hq] learned sinks, or None.
        documents: document boundaries from `ops.attention.spans`.
        scores: scale, window and softcap of the scores.

    Returns:
        [N, Hq, D].
    """
    return _ScoredAttention.apply(query, key, value, sinks, documents, scores, None)


@functools.cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


@functools.cache
def flash3() -> Callable[..., Any] | None:
    """FlashAttention 3's variable-length function; None if its package is not installed or does not run here."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != HOPPER:
        notice("flash3", "FlashAttention 3 is installed but not used: it requires a Hopper GPU")
        return None
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except (ImportError, OSError) as error:
        notice("flash3", f"FlashAttention 3 is installed but not used: {error}")
        return None
    return flash_attn_varlen_func


def supports_softcap(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention 3 is available for softcapped scores."""
    return capability(device) is not None and dtype in DTYPES and flash3() is not None


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Spans | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention within documents.

    Args:
        query: [B·T, Hq, D]; key, value: [B·T, Hk, D].
        bounds: int32 [documents + 1], start offset of each document and the total, see
            `modeling.attention.document_bounds`.
        longest: upper bound on the tokens of a document.
        scale: factor of the scores; None: 1/√D.
        window: number of tokens that a token attends to, including itself.
        softcap: scores become softcap · tanh(score / softcap); requires FlashAttention 3.
        documents: `ops.attention.spans` of the bounds; None: computed if needed.
        causal: whether a token attends to itself and the tokens before it only; False excludes a window.

    Returns:
        [B·T, Hq, D].
    """
    lengths = bounds, bounds, longest, longest
    sides = (-1 if window is None else window - 1, 0) if causal else (-1, -1)
    flash = flash3()
    if flash is not None and not on_compiler():
        warn_unrepeatable(query, "FlashAttention 3")
        deterministic = torch.are_deterministic_algorithms_enabled()
        options = {"softmax_scale": scale, "causal": causal, "softcap": softcap or 0.0, "deterministic": deterministic}
        out = flash(query, key, value, *lengths, window_size=sides, **options)
        return out[0] if isinstance(out, tuple) else out  # earlier versions also return the logsumexp
    if causal and not on_compiler() and is_hopper(query.device) and has_repeatable_varlen(query):
        documents = documents or spans(bounds, query.shape[0])
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return _VarlenAttention.apply(query, key, value, bounds, longest, documents, scale, window)
    warn_unrepeatable(query, "FlashAttention 2")
    varlen_attn, parameters = _varlen()
    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in parameters else {}
    return varlen_attn(query, key, value, *lengths, window_size=sides, scale=scale, **grouped)
