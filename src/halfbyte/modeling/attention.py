"""transformers' attention on a CUDA device without a mask: `autograd.attention`, by whole rows or by documents.

Packed rows and windows take the variable lengths of FlashAttention; capped scores (Gemma 2) FlashAttention 3 where it
is installed, else they and sinks (gpt-oss) `autograd.attention.score_mod_attention`, and on other devices and in
float32 `autograd.tiled_attention`, a tile of queries at a time.

Registered with transformers as "halfbyte" (AttentionInterface and AttentionMaskInterface), and chosen by `patch` where
a model uses "sdpa", or "eager" because its scores are its own (`has_own_scores`). What the layers need to know is
worked out once a batch, in the backbone's forward: where each document begins (from `position_ids` that restart, or as
the caller's `cu_seq_lens_q`, which waits for nothing on the device). It reaches the layers as the keyword arguments
that transformers' own flash attention reads, with `NO_MASK` in place of a mask: transformers passes masks of four
dimensions on as they are, so it builds none and does not look for documents itself.

Padding, key-value caches, float32, dropout and images that see themselves (Gemma 3) go to what transformers would have
used, with its mask.

Measured on an H200 (fwd + bwd, 4×2048, 32 heads of 128): cuDNN 398 TFLOP/s, flash 214; 16k packed tokens: variable
lengths 3.8 ms, SDPA with a dense mask 50 ms (docs/design.md).
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
from ..ops.attention import Scores, Spans, spans
from ..parallel.context.exchange import Context
from ..utils.notices import notice
from . import shared_prefix
from .cast_cache import fresh_copies
from .families import of_config
from .keywords import cache_of, check_known
from .layer import causal_lm_of
from .layer_sizes import widest
from .patch_record import patched, record

NAME = "halfbyte"
OWN = "halfbyte_own"  # where a model has scores of its own: what it falls back to is eager, and reads other masks
DIVIDED = "halfbyte_divided"  # transformers' own in forwards whose rows are cut (`parallel.context.model`), as NAME and OWN
DIVIDED_OWN = "halfbyte_divided_own"
WIDEST = 256  # values of a head that FlashAttention takes
NO_MASK = (1, 1, 0, 0)  # the shape of what stands in place of a mask


@dataclass(frozen=True)
class Implementation:
    """What computes the attention of a batch.

    Attributes:
        name: in words.
        scores: whether it builds the scores, T × T for every head, and keeps them for backward.
        mask: whether it reads a mask of T × T for every row of the batch.
        tiles: bytes of the scores that it builds at a time, of a few queries (`autograd.tiled_attention`); 0: it is not
            that.
        own: whether its backward is ours, whose sums are its results.
        repeatable: whether whole rows may take cuDNN's repeatable backward (`autograd.attention.has_repeatable_rows`).
        obstacle: why it is not halfbyte's; "" where it is.
    """

    name: str
    scores: bool
    mask: bool
    obstacle: str = ""
    tiles: int = 0
    own: bool = False
    repeatable: bool = False


def implementation(
    config: Any, device: torch.device, dtype: torch.dtype, *, packed: bool = False, padded: bool = False
) -> Implementation:
    """What computes attention in the training of a patched model; what `bind_attention` and the dispatch go by.

    Args:
        config: of the module that holds the layers.
        device: where it trains; it need not be here.
        dtype: of q, k and v.
        packed: rows hold several documents.
        padded: the batch has a mask over its padding (the fused step's batches have none).
    """
    chosen = _name_of(config)
    eager, window = chosen == "eager", getattr(config, "sliding_window", None) is not None
    obstacle = _unbound(config, device) or _unmasked(config, device, dtype)
    if not obstacle and not padded:
        if has_sinks(config) or (is_capped(config) and not causal.supports_softcap(device, dtype)):
            if causal.supports_scores(device, dtype, widest(config).head_dim):
                return Implementation("halfbyte's kernel", False, False, own=True)
            return Implementation("tiles of queries", False, False, tiles=tile_bytes(device))
        if packed or window or is_capped(config):
            return Implementation("FlashAttention 3" if causal.flash3() else "variable lengths", False, False)
        return Implementation("cuDNN", False, False, repeatable=causal.is_hopper(device))
    obstacle = obstacle or "rows are padded"
    masked = packed or padded or window or eager
    expands = not _unbound(config, device)  # `attend` gives the efficient kernel keys and values for every head
    sizes = widest(config)
    grouped = sizes.key_heads != sizes.heads
    math = chosen == "sdpa" and not masked and grouped and not expands and not _flash_takes(device, dtype)
    return Implementation(f"transformers' {chosen}", eager or math, masked, obstacle)


def _name_of(config: Any) -> str:
    """transformers' name of what the model was loaded with."""
    name = getattr(config, "_attn_implementation", None) or "sdpa"
    return {NAME: "sdpa", OWN: "eager"}.get(name, name)


def is_capped(config: Any) -> bool:
    return bool(getattr(config, "attn_logit_softcapping", None))


def has_sinks(config: Any) -> bool:
    """Whether each head has a learned score that every token gives beside its keys'."""
    family = of_config(config) if hasattr(config, "model_type") else None
    return family is not None and family.sinks


def has_own_scores(config: Any) -> bool:
    """Whether a model computes what SDPA cannot, and is loaded with transformers' eager attention for it."""
    return is_capped(config) or has_sinks(config)


def _flash_takes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel that builds no scores takes one head of keys for several of queries; on CUDA, FlashAttention."""
    found = causal.capability(device)
    return found is None or (dtype in causal.DTYPES and found >= causal.AMPERE)


def _unbound(config: Any, device: torch.device) -> str:
    """Why a model keeps transformers' attention altogether; "" where it does not."""
    own, chosen = has_own_scores(config), _name_of(config)
    if device.type != "cuda" and not own:
        return f"on {device.type}"
    if getattr(config, "use_bidirectional_attention", False):
        return "this model's attention is not causal"
    if chosen != ("eager" if own else "sdpa"):
        return "as the model was loaded with"
    return ""


def _unmasked(config: Any, device: torch.device, dtype: torch.dtype, training: bool = True) -> str:
    """Why attention of a bound model needs transformers' masks; "" where it does not."""
    if training and getattr(config, "attention_dropout", None):
        return "attention_dropout is set"
    if has_own_scores(config):
        return ""
    if dtype not in causal.DTYPES:
        return f"it is computed in {dtype}"
    if (causal.capability(device) or causal.AMPERE) < causal.AMPERE:
        return "FlashAttention needs a GPU of compute capability 8.0 (Ampere) or later"
    return ""


def bind_attention(backbone: Any) -> str:
    """Choose the attention of `backbone` (the module that holds the layers); says in words what it is now."""
    config, device = backbone.config, next(backbone.parameters()).device
    flash = "FlashAttention 3" if causal.flash3() else "variable lengths"
    if config._attn_implementation == OWN:
        what = "its heads have sinks" if has_sinks(config) else "its scores are capped"
        found = implementation(config, device, next(backbone.parameters()).dtype, packed=True)
        return f"halfbyte: {found.name}, {what}; no mask"
    if config._attn_implementation == NAME:
        if (causal.capability(device) or causal.AMPERE) < causal.AMPERE:
            return "halfbyte: PyTorch's memory-efficient attention, with transformers' masks: no FlashAttention here"
        return f"halfbyte: cuDNN for whole rows, {flash} for packed ones and windows; no mask"
    if obstacle := _unbound(config, device):
        return f"transformers' {config._attn_implementation}: {obstacle}"
    register()
    record(backbone).implementation = config._attn_implementation
    config._attn_implementation = OWN if has_own_scores(config) else NAME
    if causal.flash3():
        notice("attention-flash3", "attention of packed rows and windows is FlashAttention 3's, which is installed")
    return bind_attention(backbone)


def share(model: nn.Module, inputs: Mapping[str, Any], kept: shared_prefix.Kept | None = None) -> dict[str, Any]:
    """`inputs` of a backbone's forward; where answers share prompts, as its layers take them.

    On any device: from the first such batch until `unbind_attention` its attention is `attend`, which leaves others to
    what the model was loaded with.

    Args:
        model: a Hugging Face causal LM, plain or inside a `peft.PeftModel`, of which `branches.why_apart` says nothing.
        kept: joins two forwards, of which the second sees what the first has kept.
    """
    if shared_prefix.BRANCHES not in inputs:
        return dict(inputs)
    backbone: Any = causal_lm_of(model).base_model
    if backbone.config._attn_implementation != NAME:
        register()
        record(backbone).implementation = backbone.config._attn_implementation
        backbone.config._attn_implementation = NAME
    mask = torch.empty(NO_MASK, dtype=torch.bool, device=inputs[shared_prefix.BRANCHES].device)
    left = {name: value for name, value in inputs.items() if name not in shared_prefix.OWN}
    return left | {"attention_mask": mask, "sharing": shared_prefix.Sharing.of(inputs, kept)}


def register() -> None:
    """Make the names known to transformers, each with the mask that its fallback reads."""
    for name, mask in (
        (NAME, sdpa_mask), (DIVIDED, sdpa_mask), (OWN, eager_mask), (DIVIDED_OWN, eager_mask)
    ):  # fmt: skip
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


def unbind_attention(backbone: Any) -> None:
    """Undo `bind_attention`."""
    own = patched(backbone)
    if own is not None and own.implementation is not None:
        backbone.config._attn_implementation, own.implementation = own.implementation, None


def backbone_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A backbone's forward; first the attention's metadata of this batch, and the adapters in the compute dtype."""
    with contextlib.nullcontext() if on_compiler() else fresh_copies(self):
        return _with_metadata(self, self, args, kwargs)


def metadata_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A backbone's forward whose layers run transformers' own forwards, but for their attention."""
    return _with_metadata(self, self, args, kwargs)


def multimodal_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Gemma 3's forward over images and text: it hands its backbone masks, so what replaces them is made here."""
    return _with_metadata(self, self.language_model, args, kwargs)


def _with_metadata(model: Any, backbone: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    own = functools.partial(type(model).forward, model)
    if args or cache_of(kwargs) or kwargs.get("use_cache"):
        return own(*args, **kwargs)
    if model.training:
        kwargs["use_cache"] = False  # unless asked for: a cache in training is only dead weight
    chosen = backbone.config._attn_implementation in (NAME, OWN) and kwargs.get("use_cache") is False
    if chosen and not _has_images(kwargs):
        inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        kwargs |= metadata(backbone, inputs.shape[0], inputs.shape[1], inputs.device, kwargs)
    return own(**kwargs)


def _has_images(kwargs: dict[str, Any]) -> bool:
    """Whether a batch of a multimodal model may hold images; waits for the device where token types say so."""
    types = kwargs.get("token_type_ids")
    if kwargs.get("pixel_values") is not None:
        return True
    return types is not None and (on_compiler() or bool(types.any()))


def metadata(backbone: Any, rows: int, length: int, device: torch.device, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for the layers of a bound `backbone`; none where transformers' mask is needed.

    Args:
        rows, length: of the batch that attention sees.
        kwargs: of it: `attention_mask`, `position_ids`, `cu_seq_lens_q` and what comes with it, if there are.
    """
    own = backbone.config._attn_implementation == OWN
    if kwargs.get("attention_mask") is not None or (own and on_compiler()):
        return {}
    dtype = next(backbone.parameters()).dtype
    dtype = autocast_dtype(device.type) or dtype
    if reason := _unmasked(backbone.config, device, dtype, backbone.training):
        notice(f"attention-{reason}", f"attention is transformers' own, with a dense mask for packed rows: {reason}")
        return {}
    return _where_documents_begin(backbone, rows, length, device, kwargs)


def _where_documents_begin(
    backbone: Any, rows: int, length: int, device: torch.device, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    no_mask = {"attention_mask": torch.empty(NO_MASK, dtype=torch.bool, device=device)}
    own = backbone.config._attn_implementation == OWN
    if kwargs.get("cu_seq_lens_q") is not None:
        return no_mask | _spans(kwargs, rows * length, own)
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and position_ids.dim() == 3:  # M-RoPE: time, height and width, below the text's if four
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if position_ids is not None:
        if on_compiler():  # the number of documents would be a value that the compiler cannot know
            return {}
        packed = documents(position_ids.expand(rows, -1))
        if packed is not None:
            return no_mask | packed | _spans(packed, rows * length, own)
    window = getattr(backbone.config, "sliding_window", None)
    if (window is not None and window < length) or own or not (_is_planned(length) or on_compiler()):
        found = _lengths(torch.arange(rows + 1, dtype=torch.int32, device=device) * length, length)
        return no_mask | found | _spans(found, rows * length, own)
    return no_mask


def documents(position_ids: Tensor) -> dict[str, Any] | None:
    """Where documents begin in packed rows, as transformers' flash attention is told; waits once for the device.

    Args:
        position_ids: int [B, T], restarting with every document; a document ends with its row at the latest.

    Returns:
        cu_seq_lens_q and cu_seq_lens_k (int32 [documents + 1], where each begins in the flattened batch, then B·T), and
        max_length_q and max_length_k (tokens of the longest); None where every row is one document.
    """
    positions = position_ids.cpu()
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=-1) != 1
    if not begins[:, 1:].any():
        return None
    bounds = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel())
    return _lengths(bounds.to(torch.int32).to(position_ids.device, non_blocking=True), int(bounds.diff().max()))


def _spans(places: Mapping[str, Any], tokens: int, own: bool) -> dict[str, Any]:
    """What kernels of ours read, once a batch and not once a layer."""
    bounds = places["cu_seq_lens_q"]
    if on_compiler() or not (causal.is_hopper(bounds.device) or (own and bounds.is_cuda)):
        return {}
    return {"document_spans": spans(bounds, tokens)}


def _lengths(bounds: Tensor, longest: int) -> dict[str, Any]:
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
    context: Context | None = None,
    sharing: shared_prefix.Sharing | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [B, Hq, T, D]; key, value: [B, Hk, T, D], Hk dividing Hq.
        attention_mask: of shape `NO_MASK`, or one that transformers made; of whole rows, as all that follows.
        sliding_window: tokens that a token sees, with itself; softcap: scores become softcap · tanh(score / softcap).
        cu_seq_lens_q, max_length_q: as `documents` gives them; document_spans: `ops.attention.spans` of them.
        context: the processes that hold slices of these rows; None: the rows are whole.
        sharing: how answers share prompts, where they do.
        s_aux: [Hq], sinks; of whole rows.

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
        return _transformers(module, query, key, value, attention_mask, softcap, options)
    check_known(module, kwargs)
    rows, _, length, _ = query.shape
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if query.shape[-1] > WIDEST:
        return _wide(query, key, value, scaling, window, cu_seq_lens_q), None
    if s_aux is not None or (softcap is not None and not causal.supports_softcap(query.device, query.dtype)):
        scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap)
        return _scored(query, key, value, s_aux, scores, cu_seq_lens_q, max_length_q, document_spans), None
    whole = window is None and softcap is None and cu_seq_lens_q is not None and cu_seq_lens_q.numel() == rows + 1
    if cu_seq_lens_q is None or (whole and _is_planned(length)):
        return causal.row_attention(query, key, value, scaling).transpose(1, 2), None
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    how = max_length_q or length, scaling, window, softcap, document_spans
    return causal.varlen_attention(query, key, value, cu_seq_lens_q, *how).unflatten(0, (rows, length)), None


def _wide(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, bounds: Tensor | None
) -> Tensor:
    """Attention of heads wider than FlashAttention takes, by torch's memory-efficient kernel; arguments and result as
    `attend` has them. Of packed rows it reads a mask, one of the batch: Gemma 4 has such heads in every sixth layer."""
    causal.warn_unrepeatable(query, "torch's memory-efficient attention")
    rows, heads, length, _ = query.shape
    key, value = (repeat_kv(x, heads // x.shape[1]) for x in (key, value))
    begins = None if bounds is None else _beginnings(bounds, rows, length)
    if begins is None and window is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return out.transpose(1, 2)
    places = torch.arange(length, device=query.device)
    seen = places[:, None] >= places
    if window is not None:
        seen = seen & (places[:, None] - places < window)
    if begins is not None:
        seen = seen & (places >= begins[:, :, None])
    mask = seen.expand(rows, 1, length, length) if begins is None else seen[:, None]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    scores: Scores,
    cu_seq_lens_q: Tensor | None,
    max_length_q: int | None,
    document_spans: Spans | None,
) -> Tensor:
    """Attention with `scores` and sinks; arguments and result as `attend` has them."""
    rows, _, length, size = query.shape
    if cu_seq_lens_q is not None and causal.supports_scores(query.device, query.dtype, size):
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        found = document_spans or spans(cu_seq_lens_q, rows * length)
        return causal.score_mod_attention(query, key, value, s_aux, found, scores).unflatten(0, (rows, length))
    begins = None if cu_seq_lens_q is None else _beginnings(cu_seq_lens_q, rows, length)
    return tiled_attention(query, key, value, scores, s_aux, begins, max_length_q).transpose(1, 2)


def _transformers(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float | None, options: dict
) -> tuple[Tensor, None]:
    """What the model was loaded with."""
    causal.warn_unrepeatable(query, "transformers' attention")
    groups = query.shape[1] // key.shape[1]
    if getattr(module, "num_key_value_groups", groups) != groups:  # of rows that are cut, see `parallel.context.exchange`
        module = copy.copy(module)
        module.num_key_value_groups = groups
    if softcap is not None or "s_aux" in options:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **options | ({} if softcap is None else {"softcap": softcap}))
    few_keys = query.shape[1] != key.shape[1] and query.shape[2] > 1
    if mask is None and few_keys and not _flash_takes(query.device, query.dtype):
        # torch's only other kernel for few keys builds scores of T × T
        key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def _beginnings(bounds: Tensor, rows: int, length: int) -> Tensor | None:
    """int64 [B, T]: where in its row the document of each token begins; None where every row is one document."""
    if bounds.numel() == rows + 1:
        return None
    places = torch.arange(rows * length, device=bounds.device)
    begins = bounds[torch.searchsorted(bounds, places, right=True) - 1]
    return begins.view(rows, length) - torch.arange(0, rows * length, length, device=bounds.device)[:, None]


# Of the process: layers that are computed again are so in autograd's own thread.
_planned: Collection[int] | None = None  # None: every length


def _is_planned(length: int) -> bool:
    """Whether cuDNN takes rows of `length` tokens that are one document each."""
    return _planned is None or length in _planned


@contextlib.contextmanager
def planned_lengths(lengths: Collection[int] | None) -> Iterator[None]:
    """Inside, rows that are one document each take cuDNN where they have one of these lengths, else FlashAttention;
    None: cuDNN always.

    cuDNN plans for each length: on an H200 the first forward and backward of one takes 115 to 150 ms, FlashAttention's
    1 ms; from then on it is 1.5 to 1.8 times as fast.
    """
    global _planned
    before, _planned = _planned, lengths
    try:
        yield
    finally:
        _planned = before
