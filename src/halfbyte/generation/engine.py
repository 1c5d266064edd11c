"""Engines that compute the next token's logits for a static batch.

`StaticEngine` runs halfbyte's forward over a static cache; `stock` runs transformers' own forward, for models that
halfbyte does not support. Static engines are cached per model, with their cache's memory and CUDA graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..modeling.layer import epsilon
from ..ops.attention import Spans
from ..ops.decode import Run, Stack, decode_attention, one_launch, store, store_both_
from ..ops.paged_attention import PAGE, rope_store_paged_
from ..ops.paged_attention4 import Cache4, Prompts, append4_, paged_attention4, store_prompts4_
from ..utils.errors import ModelError
from ..utils.hardware import capture_stream
from ..utils.notices import notice
from .adapters import MixedRows, Unsupported
from .cache_dtypes import CACHES, INT4
from .decoder import (
    Angles,
    AttentionLayer,
    Decoder,
    DeltaNetLayer,
    Layer,
    context_length,
    prompt_attention,
    scored_attention,
)
from .delta_net import Rows
from .images import ImagePrompt, PlacedPrompt, PromptImages, embed_prompts
from .row_groups import Engine, RowGroups, WatchPrompt
from .schedule import page_count
from .stock import stock_engine

# On a CPU, prompts and the attended slots of each row are padded to multiples of this, which bounds the number of GEMM
# shapes and makes a row's sums independent of the other rows.
SLOT_MULTIPLE = 32
WATCHED_LOGITS = 2**24  # prompt logits computed at once for `watch`


def prompt_slots(tokens: int, device: torch.device) -> int:
    """Return the cache slots of a prompt of `tokens` tokens, padding included."""
    return -(-tokens // SLOT_MULTIPLE) * SLOT_MULTIPLE if device.type == "cpu" else tokens


class StaticEngine(Decoder):
    """An engine over a static key-value cache.

    On a CUDA device a step is captured in a CUDA graph at its second call and replayed from then on.

    Args:
        model: a causal LM, or a PeftModel around one.
        adapters: the adapter of each row; None for the base.
        slots: tokens that fit in the cache.
        cache_dtype: of `cache_dtypes`: None for the model's dtype, FP8 (values beyond ±448 are clamped), or INT4.

    Raises:
        Unsupported: the model, or a part of it, needs transformers' own forward.
    """

    def __init__(self, model: Any, adapters: Sequence[str | None], slots: int, cache_dtype: torch.dtype | None):
        super().__init__(model, adapters, slots)
        batch = len(adapters)
        self.table = torch.empty(0)  # pages of each row in a cache in 4 bits, int32 [B, S / PAGE]
        if cache_dtype is INT4:
            row_pages = page_count(slots)
            self.table = torch.arange(batch * row_pages, dtype=torch.int32, device=self.device).view(batch, row_pages)
        self.caches = [self._cache(layer, batch, slots, cache_dtype or self.dtype) for layer in self.layers]
        self.seats = torch.arange(batch, device=self.device)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.padding = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.shift = torch.zeros(batch, dtype=torch.int32, device=self.device)  # see `ImagePrompt.shift`
        self.shifted = False
        self.slots = slots
        self.steps = 0
        self.last_logits = torch.empty(0)
        self.row_groups = [(slice(0, batch), 0)]  # rows with the same first slot, and that slot
        self.graph: torch.cuda.CUDAGraph | None = None
        self.one_launch = self._one_launch(batch)

    def _cache(self, layer: Layer, batch: int, slots: int, dtype: torch.dtype) -> Any:
        """Allocate keys and values [B, Hk, S, D], a `Cache4`, or `States`."""
        if isinstance(layer, DeltaNetLayer):
            return layer.inputs.states(batch, self.device)
        assert isinstance(layer, AttentionLayer)
        heads, size = layer.cache_shape
        if dtype is INT4:
            return Cache4.zeros(self.table.numel(), batch, heads, size, self.dtype, self.device)
        shape = batch, heads, slots, size
        keys, values = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
        return keys, values

    @torch.inference_mode()
    def renew(self, model: Any) -> bool:
        if not super().renew(model):
            return False
        if self.device.type == "cpu":  # the CPU kernel may hold copies of the weights
            self.one_launch = self._one_launch(len(self.tokens))
        return True

    def _one_launch(self, batch: int) -> Run | None:
        """Return the persistent decode kernel for all layers, or None if a layer or the device does not support it."""
        if self.table.numel():
            return None
        pairs = list(zip(self.attention_layers, self.caches, strict=False))
        layers = [decoder_layer for layer, cache in pairs if (decoder_layer := layer.one_launch(*cache)) is not None]
        if len(layers) < len(self.layers):
            return None
        epsilons = {epsilon(half.norm) for layer in self.layers for half in layer.halves}
        epsilons |= {epsilon(norm) for layer in self.attention_layers for norm in layer.attention.norms or ()}
        if len(epsilons) > 1 or len(self.ropes) > 1:
            return None
        first = self.attention_layers[0]
        shared = epsilons.pop(), first.attention.scaling, *self.ropes[first.attention.rope], self.padding, self.slot
        hidden = torch.empty(batch, self.embed.weight.shape[1], dtype=self.dtype, device=self.device)
        return one_launch(hidden, Stack(layers, first.attention.heads, *shared))

    def prefill(
        self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None = None, images: Mapping[int, PromptImages] = {}
    ) -> Tensor:
        prompts = embed_prompts(images, [tokens[row, int(pad) :] for row, pad in enumerate(padding)])
        return self._prefill(tokens, padding, watch, prompts)

    @torch.inference_mode()
    def _prefill(
        self, tokens: Tensor, padding: Tensor, watch: WatchPrompt | None, images: Mapping[int, ImagePrompt]
    ) -> Tensor:
        self._place_later_tokens([images[row].shift if row in images else 0 for row in range(len(tokens))])
        length = prompt_slots(tokens.shape[1], self.device)
        extra = length - tokens.shape[1]
        tokens, padding = F.pad(tokens, (extra, 0)), padding + extra
        if self.device.type == "cpu":
            # Groups of neighbouring rows with equal starts, as (rows, start).
            starts = [pad // SLOT_MULTIPLE * SLOT_MULTIPLE for pad in padding.tolist()]
            changes = [at for at in range(1, len(starts)) if starts[at] != starts[at - 1]]
            self.row_groups = [
                (slice(begin, end), starts[begin]) for begin, end in pairwise([0, *changes, len(starts)])
            ]
        slots = torch.arange(length, device=self.device)
        self.padding.copy_(padding)
        self.slot.fill_(length - 1)
        positions = (slots - padding.unsqueeze(1)).clamp_(min=0)
        masks: dict[int | None, Tensor] = {}
        for window in {layer.attention.window for layer in self.attention_layers}:
            seen = (slots <= slots.unsqueeze(1)) & (slots >= padding.view(-1, 1, 1))
            if window is not None:
                seen &= slots > slots.unsqueeze(1) - window
            for row, prompt in images.items() if self.bidirectional_images else ():
                image = F.pad(prompt.image, (length - len(prompt.image), 0), value=-1)
                seen[row] |= (image == image.unsqueeze(1)) & (image >= 0)
            masks[window] = (seen | (slots == slots.unsqueeze(1))).unsqueeze(1)  # padding sees itself: no NaN

        documents = self._spans(slots)
        prompts = self._prompts(padding.tolist(), length) if self.table.numel() else None

        def attend(number: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            q, k = self.rotated(layer, q, k, angles)
            if prompts is not None:
                store_prompts4_(self.caches[number], prompts, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
            else:
                for cache, new in zip(self.caches[number], (k, v), strict=True):
                    store(cache, slots, new)
            if not (images and self.bidirectional_images):
                scored = scored_attention(layer, q, k, v, documents)
                if scored is not None:
                    return scored
            mask = masks[layer.attention.window]

            def attend_rows(rows: slice, begin: int) -> Tensor:
                """Attention of some rows, without the padding before their own slots."""
                row_q, row_k, row_v = (x[rows, :, begin:] for x in (q, k, v))
                out = prompt_attention(layer, row_q, row_k, row_v, mask[rows, :, begin:, begin:])
                return F.pad(out, (0, 0, begin, 0)) if begin else out

            return self._by_row_group(attend_rows)

        recurrent_rows = [] if len(self.attention_layers) == len(self.layers) else self._rows(length)
        hidden = self.forward(
            tokens,
            positions,
            attend,
            lambda number, layer, x: layer.inputs.prompts(x, recurrent_rows, self.caches[number]),
            [PlacedPrompt(row, length - len(prompt.image), prompt) for row, prompt in images.items()],
        )
        if watch is not None:
            at_once = max(1, WATCHED_LOGITS // (len(tokens) * self.embed.weight.shape[0]))
            for begin in range(extra, length, at_once):
                chunk = hidden[:, begin : begin + at_once]
                logits = self.logits(chunk.flatten(0, 1).unsqueeze(1)).unflatten(0, chunk.shape[:2])
                watch(range(len(tokens)), begin - extra, logits)
        return self.logits(hidden[:, -1:])

    def _place_later_tokens(self, shifts: list[int]) -> None:
        """Set the shift of each row's later tokens; a captured step is dropped where it computes others."""
        self.shift.copy_(torch.tensor(shifts))
        if self.shifted != any(shifts):
            self.shifted = any(shifts)
            self.graph = None
            self.steps = 0

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.steps += 1
        if self.device.type == "cuda" and self.steps == 2:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=capture_stream(self.device.index)):
                self.last_logits = self._step()
        if self.graph is not None:
            self.graph.replay()
            return self.last_logits
        return self._step()

    def _step(self) -> Tensor:
        self.slot.add_(1)
        if self.one_launch is not None and not self.shifted:
            hidden = self.one_launch(self.embedded(self.tokens)).unsqueeze(1)
            return self.logits(self.normed(self.norm, hidden)[0])
        end = prompt_slots(int(self.slot) + 1, self.device) if self.device.type == "cpu" else None
        positions = self.slot - self.padding
        pages = self.table.gather(1, (positions // PAGE).unsqueeze(1)).squeeze(1).long() if self.table.numel() else None
        lengths = (positions + 1).int()
        slots = self.slot.expand(len(self.seats)).contiguous()

        def attend(number: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            cache, seats = self.caches[number], self.seats
            if pages is not None:
                q, k = self.rotated(layer, q, k, angles)
                append4_(k[:, :, 0], v[:, :, 0], cache, pages, positions % PAGE, seats)
                options = *layer.scores, None, layer.sinks
                return paged_attention4(q[:, :, 0], cache, self.table, lengths, seats, *options).unsqueeze(2)
            if layer.plain_rope and angles[0].shape[-1] == layer.attention.head_dim:
                rope_store_paged_(q, k, v, *angles, *cache, seats, slots)  # a row's cache is its page
            else:
                q, k = self.rotated(layer, q, k, angles)
                store_both_(k, v, *cache, self.slot)

            def attend_rows(rows: slice, begin: int) -> Tensor:
                """Attention of one token of some rows over these rows' own slots of the cache."""
                first, last = self.padding[rows], self.slot
                if begin:
                    first, last = first - begin, last - begin
                keys, values = (part[rows, :, begin:end] for part in cache)
                return decode_attention(q[rows], keys, values, first, last, *layer.scores, layer.sinks)

            return self._by_row_group(attend_rows)

        def recur(number: int, layer: DeltaNetLayer, x: Tensor) -> Tensor:
            return layer.inputs.step(x, self.caches[number], self.seats)

        rotated = (positions + self.shift).unsqueeze(1)
        return self.logits(self.forward(self.tokens.unsqueeze(1), rotated, attend, recur))

    def _prompts(self, padding: list[int], length: int) -> Prompts:
        """Return where the tokens of prompts of `length` slots belong in a cache in 4 bits."""
        pages = zip(padding, self.table.tolist(), strict=True)
        documents = [(row * length + pad, length - pad, table, row) for row, (pad, table) in enumerate(pages)]
        return Prompts.of(documents, self.device)

    def _spans(self, slots: Tensor) -> Spans:
        """Return each prompt, and the padding before it, as documents."""
        padding, begin = self.padding.unsqueeze(1), self.seats.unsqueeze(1) * len(slots)
        within = slots >= padding
        begins, ends = padding.where(within, 0) + begin, begin + torch.where(within, len(slots), padding)
        return begins.flatten().int(), ends.flatten().int()

    def _rows(self, length: int) -> list[Rows]:
        """Return the prompts without their padding, of `length` slots each."""
        slots = torch.arange(length, device=self.device) + self.padding.unsqueeze(1)
        index = slots.clamp(max=length - 1) + self.seats.unsqueeze(1) * length
        return [Rows.of(index, slots < length, self.seats)]

    def _by_row_group(self, attend: Callable[[slice, int], Tensor]) -> Tensor:
        outs = [attend(rows, begin) for rows, begin in self.row_groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


# --- cached engines --------------------------------------------------------------------------------------------------

SIZE_MULTIPLE = 64  # cache sizes are multiples of this
MAX_CACHED_ENGINES = 4  # per model; chat with --compare-base needs two

Key = tuple[tuple[str | None, ...], str]
_engines: weakref.WeakKeyDictionary[Any, dict[Key, StaticEngine]] = weakref.WeakKeyDictionary()


def forget(model: Any) -> None:
    """Free the key-value caches and CUDA graphs that `generate` and `stream` cache for this model."""
    _engines.pop(model, None)


@contextlib.contextmanager
def engine_for(model: Any, adapters: Sequence[str | None], tokens: int, kv_cache: str) -> Iterator[Engine]:
    """Lend an engine for rows of `tokens` tokens to one caller; it returns to the cache unless its use raises."""
    rows = range(len(adapters))
    groups: list[Sequence[int]] = [rows]
    engines: list[StaticEngine] = []
    try:
        try:
            engines = [_take_or_build(model, (tuple(adapters), kv_cache), tokens)]
        except MixedRows:
            groups = [[row for row in rows if adapters[row] == name] for name in dict.fromkeys(adapters)]
            for group in groups:
                engines.append(_take_or_build(model, _group_key(adapters, group, kv_cache), tokens))
    except Unsupported as reason:
        notice(f"generation: {reason}", f"generating with transformers' own forward, which is slower: {reason}")
        if kv_cache != "auto":
            raise ModelError(f"kv_cache: {kv_cache}, but {reason}", "use kv_cache: auto") from reason
        yield stock_engine(model, adapters, tokens)
        return
    pairs = list(zip(groups, engines, strict=True))
    try:
        yield engines[0] if len(engines) == 1 else RowGroups(lambda *_: pairs)
    except GeneratorExit:  # the caller closed the stream
        raise
    except BaseException:
        pairs = []
        raise
    finally:
        for group, engine in pairs:
            cached = _engines.setdefault(model, {})
            cached[_group_key(adapters, group, kv_cache)] = engine
            while len(cached) > MAX_CACHED_ENGINES:
                del cached[next(iter(cached))]


def _group_key(adapters: Sequence[str | None], group: Sequence[int], kv_cache: str) -> Key:
    return tuple(adapters[row] for row in group), kv_cache


def _take_or_build(model: Any, key: Key, tokens: int) -> StaticEngine:
    """Take a cached engine, or build one; of twice the size if the cached one is too small, for growing chats."""
    engine = _engines.get(model, {}).pop(key, None)
    if engine is not None:
        if engine.slots >= tokens and engine.renew(model):
            return engine
        limit = context_length(model) or tokens
        tokens = max(tokens, min(2 * engine.slots, limit) if engine.slots < tokens else engine.slots)
        del engine  # free its memory before allocating the next
    with torch.inference_mode():
        return StaticEngine(model, key[0], -(-tokens // SIZE_MULTIPLE) * SIZE_MULTIPLE, CACHES[key[1]])
