"""halfbyte's attention for transformers: mask-free kernels for packed, windowed, capped and sink attention.

On CUDA, full rows use cuDNN (`autograd.attention`); packed rows and windows use FlashAttention's variable lengths.
Capped scores (Gemma 2) use FlashAttention 3 if it is installed; otherwise capped scores and sinks (gpt-oss) use
`autograd.attention.score_mod_attention`. Other devices and float32 use `autograd.tiled_attention`, one tile of queries
at a time.

The functions are registered with transformers as "halfbyte" (AttentionInterface and AttentionMaskInterface). `patch`
selects them if a model uses "sdpa", or "eager" because its scores are capped or have sinks (`has_custom_scores`). The
backbone's forward computes the layers' metadata once a batch: where each document begins, from restarting
`position_ids` or from the caller's `cu_seq_lens_q`, which needs no device synchronisation. The metadata reaches the
layers as the keyword arguments of transformers' own flash attention, with `NO_MASK` in place of a mask: transformers
passes 4-D masks through, so it builds none and does not search for documents itself.

Padding, key-value caches, float32, dropout and bidirectional image tokens (Gemma 3) fall back to the attention that
the model was loaded with, and its mask.

Measured on an H200 (forward + backward, 4×2048, 32 heads of 128): cuDNN 398 TFLOP/s, FlashAttention 214. 16k packed
tokens: variable lengths 3.8 ms, SDPA with a dense mask 50 ms.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ..autograd import attention as causal
from ..autograd.tiled_attention import tile_bytes, tiled_attention
from ..dispatch import autocast_dtype, on_compiler
from ..mesh.head_exchange import ContextGroup
from ..ops.attention import Scores, Spans, spans
from ..utils.notices import notice
from . import shared_prefix
from .cast_cache import use_cast_cache
from .config_facts import has_custom_scores, has_sinks, is_capped, max_layer_sizes
from .layer import causal_lm_of, check_keywords
from .patch_record import existing_record, record
from .transformers_versions import given_cache

# Names registered with transformers. A name fixes the fallback and the kind of mask: SDPA's, or eager for models with
# caps or sinks. The last two are for forwards of context-parallel shards (`parallel.context`).
ATTENTION_NAME = "halfbyte"
SCORES_NAME = "halfbyte_own"
CONTEXT_NAME = "halfbyte_divided"
CONTEXT_SCORES_NAME = "halfbyte_divided_own"
MAX_HEAD_DIM = 256  # of FlashAttention
NO_MASK = (1, 1, 0, 0)  # shape of the placeholder for "no mask"


@dataclass(frozen=True)
class Implementation:
    """The attention implementation of a batch, and its memory use.

    Attributes:
        name: name for logs.
        scores: whether it materializes the scores, T × T per head, and saves them for backward.
        mask: whether it reads a T × T mask per row of the batch.
        obstacle: why halfbyte's attention is not used; "" if it is.
        tiles: bytes of the scores materialized at a time (`autograd.tiled_attention`); 0 for other implementations.
        own_backward: whether halfbyte's own backward runs, which needs no fp32 buffers to accumulate dq, dk and dv.
        repeatable: whether full rows may use cuDNN's deterministic backward (`autograd.attention.has_repeatable_rows`).
    """

    name: str
    scores: bool
    mask: bool
    obstacle: str = ""
    tiles: int = 0
    own_backward: bool = False
    repeatable: bool = False


def implementation(
    config: Any, device: torch.device, dtype: torch.dtype, *, packed: bool = False, padded: bool = False
) -> Implementation:
    """Return the attention that trains a patched model on `device`, by the rules of `bind_attention` and `attend`.

    Args:
        config: config of the module that holds the layers.
        device: the training device; it need not be present.
        dtype: dtype of q, k and v.
        packed: whether rows hold several documents.
        padded: whether the batch has a padding mask (the fused step's batches have none).
    """
    chosen = _implementation_name(config)
    eager, window = chosen == "eager", getattr(config, "sliding_window", None) is not None
    obstacle = _reason_unbound(config, device) or _reason_masked(config, device, dtype)
    if not obstacle and not padded:
        if has_sinks(config) or (is_capped(config) and not causal.supports_softcap(device, dtype)):
            if causal.supports_scores(device, dtype, max_layer_sizes(config).head_dim):
                return Implementation("halfbyte's kernel", False, False, own_backward=True)
            return Implementation("tiles of queries", False, False, tiles=tile_bytes(device))
        if packed or window or is_capped(config):
            return Implementation("FlashAttention 3" if causal.flash3() else "variable lengths", False, False)
        return Implementation("cuDNN", False, False, repeatable=causal.is_hopper(device))
    obstacle = obstacle or "rows are padded"
    masked = packed or padded or window or eager
    expands = not _reason_unbound(config, device)  # `attend` repeats keys and values for the memory-efficient kernel
    sizes = max_layer_sizes(config)
    grouped = sizes.key_heads != sizes.heads
    math = chosen == "sdpa" and not masked and grouped and not expands and not _flash_takes(device, dtype)
    return Implementation(f"transformers' {chosen}", eager or math, masked, obstacle)


def _implementation_name(config: Any) -> str:
    """Return transformers' name of the attention that the model was loaded with."""
    name = getattr(config, "_attn_implementation", None) or "sdpa"
    return {ATTENTION_NAME: "sdpa", SCORES_NAME: "eager"}.get(name, name)


def _flash_takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether SDPA supports grouped keys without materializing scores; on CUDA, this is FlashAttention."""
    capability = causal.capability(device)
    return capability is None or (dtype in causal.DTYPES and capability >= causal.AMPERE)


def _reason_unbound(config: Any, device: torch.device) -> str:
    """Return why a model keeps transformers' attention for all batches, or ""."""
    custom, chosen = has_custom_scores(config), _implementation_name(config)
    if device.type != "cuda" and not custom:
        return f"on {device.type}"
    if getattr(config, "use_bidirectional_attention", False):
        return "this model's attention is not causal"
    if chosen != ("eager" if custom else "sdpa"):
        return "as the model was loaded with"
    return ""


def _reason_masked(config: Any, device: torch.device, dtype: torch.dtype, training: bool = True) -> str:
    """Return why a bound model's batch needs transformers' masks, or ""."""
    if training and getattr(config, "attention_dropout", None):
        return "attention_dropout is set"
    if has_custom_scores(config):
        return ""
    if dtype not in causal.DTYPES:
        return f"it is computed in {dtype}"
    if (causal.capability(device) or causal.AMPERE) < causal.AMPERE:
        return "FlashAttention needs a GPU of compute capability 8.0 (Ampere) or later"
    return ""


def bind_attention(backbone: Any) -> str:
    """Select the attention of `backbone`, the module that holds the layers, and return its description."""
    config, device = backbone.config, next(backbone.parameters()).device
    flash = "FlashAttention 3" if causal.flash3() else "variable lengths"
    if config._attn_implementation == SCORES_NAME:
        reason = "its heads have sinks" if has_sinks(config) else "its scores are capped"
        chosen = implementation(config, device, next(backbone.parameters()).dtype, packed=True)
        return f"halfbyte: {chosen.name}, {reason}; no mask"
    if config._attn_implementation == ATTENTION_NAME:
        if (causal.capability(device) or causal.AMPERE) < causal.AMPERE:
            return "halfbyte: PyTorch's memory-efficient attention, with transformers' masks: no FlashAttention here"
        return f"halfbyte: cuDNN for full rows, {flash} for packed ones and windows; no mask"
    if obstacle := _reason_unbound(config, device):
        return f"transformers' {config._attn_implementation}: {obstacle}"
    register()
    record(backbone).implementation = config._attn_implementation
    config._attn_implementation = SCORES_NAME if has_custom_scores(config) else ATTENTION_NAME
    if causal.flash3():
        notice("attention-flash3", "attention of packed rows and windows is FlashAttention 3's, which is installed")
    return bind_attention(backbone)


def with_shared_prefixes(
    model: nn.Module, inputs: Mapping[str, Any], cache: shared_prefix.PrefixCache | None = None
) -> dict[str, Any]:
    """Return `inputs` of a backbone's forward; for a batch of shared prompts, with the `Sharing` that layers read.

    Works on any device. From the first such batch until `unbind_attention`, the model's attention is `attend`, which
    falls back to the loaded attention for other batches.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`, that `shared_prefix.unshared_reason`
            accepts.
        cache: shared by two forwards; the second attends to the keys and values of the first.
    """
    if shared_prefix.BRANCHES not in inputs:
        return dict(inputs)
    backbone: Any = causal_lm_of(model).base_model
    if backbone.config._attn_implementation != ATTENTION_NAME:
        register()
        record(backbone).implementation = backbone.config._attn_implementation
        backbone.config._attn_implementation = ATTENTION_NAME
    mask = torch.empty(NO_MASK, dtype=torch.bool, device=inputs[shared_prefix.BRANCHES].device)
    model_inputs = {name: value for name, value in inputs.items() if name not in shared_prefix.SHARING_KEYWORDS}
    return model_inputs | {"attention_mask": mask, "sharing": shared_prefix.Sharing.of(inputs, cache)}


def register() -> None:
    """Register the attention names with transformers, each with its fallback's mask function."""
    for name, mask in (
        (ATTENTION_NAME, sdpa_mask),
        (CONTEXT_NAME, sdpa_mask),
        (SCORES_NAME, eager_mask),
        (CONTEXT_SCORES_NAME, eager_mask),
    ):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


def unbind_attention(backbone: Any) -> None:
    """Undo `bind_attention`."""
    patched = existing_record(backbone)
    if patched is not None and patched.implementation is not None:
        backbone.config._attn_implementation, patched.implementation = patched.implementation, None


def backbone_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backbone's forward with this batch's attention metadata and adapters cast to the compute dtype."""
    with contextlib.nullcontext() if on_compiler() else use_cast_cache(self):
        return _forward_with_metadata(self, self, args, kwargs)


def metadata_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backbone's forward with this batch's attention metadata; its layers keep transformers' forwards."""
    return _forward_with_metadata(self, self, args, kwargs)


def multimodal_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Gemma 3's forward over images and text; it passes masks to its backbone, so the metadata is made here."""
    return _forward_with_metadata(self, self.language_model, args, kwargs)


def _forward_with_metadata(model: Any, backbone: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    forward = functools.partial(type(model).forward, model)
    if args or given_cache(kwargs) or kwargs.get("use_cache"):
        return forward(*args, **kwargs)
    if model.training:
        kwargs["use_cache"] = False  # unless requested: a cache in training only costs memory
    chosen = backbone.config._attn_implementation in (ATTENTION_NAME, SCORES_NAME) and kwargs.get("use_cache") is False
    types = kwargs.get("token_type_ids")
    # a batch of text may have token types, which are read with a device synchronisation
    images = kwargs.get("pixel_values") is not None or (types is not None and (on_compiler() or bool(types.any())))
    if chosen and not images:
        inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        kwargs |= metadata(backbone, inputs.shape[0], inputs.shape[1], inputs.device, kwargs)
    return forward(**kwargs)


def metadata(backbone: Any, rows: int, length: int, device: torch.device, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for the layers of a bound `backbone`; empty if transformers' mask is needed.

    Args:
        rows, length: shape of the batch that attention sees.
        kwargs: the batch's `attention_mask`, `position_ids`, `cu_seq_lens_q` and related keywords, if present.
    """
    custom_scores = backbone.config._attn_implementation == SCORES_NAME
    if kwargs.get("attention_mask") is not None or (custom_scores and on_compiler()):
        return {}
    dtype = next(backbone.parameters()).dtype
    dtype = autocast_dtype(device.type) or dtype
    if reason := _reason_masked(backbone.config, device, dtype, backbone.training):
        notice(f"attention-{reason}", f"attention is transformers' own, with a dense mask for packed rows: {reason}")
        return {}
    no_mask = {"attention_mask": torch.empty(NO_MASK, dtype=torch.bool, device=device)}
    if kwargs.get("cu_seq_lens_q") is not None:
        return no_mask | _span_keywords(kwargs, rows * length, custom_scores)
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.dim() == 3:  # M-RoPE: (text,) time, height, width
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if position_ids is not None:
        if on_compiler():  # the number of documents would be data-dependent
            return {}
        packed = document_bounds(position_ids.expand(rows, -1))
        if packed is not None:
            return no_mask | packed | _span_keywords(packed, rows * length, custom_scores)
    window = getattr(backbone.config, "sliding_window", None)
    if (window is not None and window < length) or custom_scores or not (_takes_cudnn(length) or on_compiler()):
        lengths = _length_keywords(torch.arange(rows + 1, dtype=torch.int32, device=device) * length, length)
        return no_mask | lengths | _span_keywords(lengths, rows * length, custom_scores)
    return no_mask


def document_bounds(position_ids: Tensor) -> dict[str, Any] | None:
    """Return the document bounds of packed rows as transformers' flash attention takes them; synchronizes once.

    Args:
        position_ids: int [B, T], restarting with every document; a document ends with its row at the latest.

    Returns:
        cu_seq_lens_q and cu_seq_lens_k (int32 [documents + 1], start of each in the flattened batch, then B·T), and
        max_length_q and max_length_k (tokens of the longest document). None if every row is one document.
    """
    positions = position_ids.cpu()
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    if not begins[:, 1:].any():
        return None
    bounds = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel())
    return _length_keywords(bounds.to(torch.int32).to(position_ids.device, non_blocking=True), int(bounds.diff().max()))


def _span_keywords(lengths: Mapping[str, Any], tokens: int, custom_scores: bool) -> dict[str, Any]:
    """Return the document spans that halfbyte's kernels read, computed once a batch instead of once a layer."""
    bounds = lengths["cu_seq_lens_q"]
    if on_compiler() or not (causal.is_hopper(bounds.device) or (custom_scores and bounds.is_cuda)):
        return {}
    return {"document_spans": spans(bounds, tokens)}


def _length_keywords(bounds: Tensor, longest: int) -> dict[str, Any]:
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    document_spans: Spans | None = None,
    context: ContextGroup | None = None,
    sharing: shared_prefix.Sharing | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention, as transformers' AttentionInterface calls it.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, T, D], Hk dividing Hq.
        attention_mask: of shape `NO_MASK`, or a mask that transformers made for full rows.
        sliding_window: number of tokens visible to a token, itself included.
        softcap: scores become softcap · tanh(score / softcap).
        cu_seq_lens_q, max_length_q: from `document_bounds`; document_spans: `ops.attention.spans` of them.
        context: the context-parallel group that holds shards of these rows; None: the rows are complete.
        sharing: layout of answers that share prompts, if any.
        s_aux: [Hq], attention sinks.

    Returns:
        [B, T, Hq, D], and None (no weights).
    """
    if context is not None:
        heads = query.shape[1]
        query, key, value = context.to_heads(query, key, value)
        out, _ = attend(
            module, query, key, value, attention_mask, dropout, scaling, sliding_window, softcap,
            cu_seq_lens_q, max_length_q, document_spans, **kwargs,
        )  # fmt: skip
        return context.to_tokens(out, heads), None
    if sharing is not None:
        return shared_prefix.attend(query, key, value, sharing, scaling), None
    if attention_mask is None or tuple(attention_mask.shape) != NO_MASK:
        options = kwargs | {"dropout": dropout, "scaling": scaling} | ({} if s_aux is None else {"s_aux": s_aux})
        return _transformers_attention(module, query, key, value, attention_mask, softcap, options)
    check_keywords(module, kwargs)
    rows, _, length, _ = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if query.shape[-1] > MAX_HEAD_DIM:
        return _wide_attention(query, key, value, scaling, window, cu_seq_lens_q), None
    if s_aux is not None or (softcap is not None and not causal.supports_softcap(query.device, query.dtype)):
        scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
        return _custom_score_attention(
            query, key, value, s_aux, scores, cu_seq_lens_q, max_length_q, document_spans
        ), None
    full_rows = window is None and softcap is None and cu_seq_lens_q is not None and cu_seq_lens_q.numel() == rows + 1
    if cu_seq_lens_q is None or (full_rows and _takes_cudnn(length)):
        return causal.row_attention(query, key, value, scaling).transpose(1, 2), None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = causal.varlen_attention(
        query, key, value, cu_seq_lens_q, max_length_q or length, scaling, window, softcap, document_spans
    )
    return out.unflatten(0, (rows, length)), None


def _wide_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, bounds: Tensor | None
) -> Tensor:
    """Attention with heads wider than FlashAttention supports, by torch's memory-efficient kernel.

    Arguments and result are those of `attend`. Packed rows need a mask: Gemma 4 has such heads in every sixth layer.
    """
    causal.warn_unrepeatable(query, "torch's memory-efficient attention")
    rows, heads, length, _ = query.shape
    key, value = (repeat_kv(x, heads // x.shape[1]) for x in (key, value))
    begins = None if bounds is None else _document_starts(bounds, rows, length)
    if begins is None and window is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2)
    positions = torch.arange(length, device=query.device)
    seen = positions[:, None] >= positions
    if window is not None:
        seen = seen & (positions[:, None] - positions < window)
    if begins is not None:
        seen = seen & (positions >= begins[:, :, None])
    mask = seen.expand(rows, 1, length, length) if begins is None else seen[:, None]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2)


def _custom_score_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    scores: Scores,
    cu_seq_lens_q: Tensor | None,
    max_length_q: int | None,
    document_spans: Spans | None,
) -> Tensor:
    """Attention with capped scores or sinks; arguments and result are those of `attend`."""
    rows, _, length, size = query.shape
    if cu_seq_lens_q is not None and causal.supports_scores(query.device, query.dtype, size):
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        bounds = document_spans or spans(cu_seq_lens_q, rows * length)
        return causal.score_mod_attention(query, key, value, s_aux, bounds, scores).unflatten(0, (rows, length))
    begins = None if cu_seq_lens_q is None else _document_starts(cu_seq_lens_q, rows, length)
    return tiled_attention(query, key, value, scores, s_aux, begins, max_length_q).transpose(1, 2)


def _transformers_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None, options: dict
) -> tuple[Tensor, None]:
    """Attention that the model was loaded with."""
    causal.warn_unrepeatable(query, "transformers' attention")
    groups = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:  # context parallelism changes the number of heads
        module = copy.copy(module)
        module.num_key_value_groups = groups
    if softcap is not None or "s_aux" in options:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **options | ({} if softcap is None else {"softcap": softcap}))
    few_keys = query.shape[1] != key.shape[1] and query.shape[2] > 1
    if mask is None and few_keys and not _flash_takes(query.device, query.dtype):
        # otherwise torch uses the math kernel, which materializes T × T scores
        key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def _document_starts(bounds: Tensor, rows: int, length: int) -> Tensor | None:
    """Return int64 [B, T], the start of each token's document within its row; None if every row is one document."""
    if bounds.numel() == rows + 1:
        return None
    tokens = torch.arange(rows * length, device=bounds.device)
    begins = bounds[torch.searchsorted(bounds, tokens, right=True) - 1]
    return begins.view(rows, length) - torch.arange(0, rows * length, length, device=bounds.device)[:, None]


# Process-wide, not thread-local: activation checkpointing reruns layers in autograd's threads.
_cudnn_lengths: Collection[int] | None = None  # None: every length


def _takes_cudnn(length: int) -> bool:
    """Return whether cuDNN computes single-document rows of `length` tokens."""
    return _cudnn_lengths is None or length in _cudnn_lengths


@contextlib.contextmanager
def cudnn_lengths(lengths: Collection[int] | None) -> Iterator[None]:
    """Use cuDNN for single-document rows of these lengths, and FlashAttention for others; None: cuDNN for all lengths.

    cuDNN builds a plan per length: on an H200 the first forward and backward take 115 to 150 ms, FlashAttention's 1 ms;
    afterwards cuDNN is 1.5 to 1.8 times as fast.
    """
    global _cudnn_lengths
    previous, _cudnn_lengths = _cudnn_lengths, lengths
    try:
        yield
    finally:
        _cudnn_lengths = previous
