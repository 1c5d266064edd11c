"""The decoder over a paged cache: prefill of packed prompts, then one token per row and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.attention import varlen_attention
from ..modeling.head import Head
from ..modeling.packed_forwards import length_groups
from ..ops.attention import spans
from ..ops.paged_attention import PAGE, Shared, paged_attention, rope_store_paged_, store_paged
from ..ops.paged_attention4 import Cache4, Prompts, append4_, paged_attention4, store_prompts4_
from .cache_dtypes import INT4, page_bytes
from .decoder import Angles, AttentionLayer, Decoder, DeltaNetLayer, prompt_attention, scored_attention
from .delta_net import Rows, state_bytes
from .images import ImagePrompt, PlacedPrompt

MIN_CPU_ROWS = 4  # MKL sums in another order for fewer rows, so results would depend on the batch size


def to_device(values: Any, device: torch.device) -> Tensor:
    """Copy numbers to the device without synchronizing."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PagedDecoder(Decoder):
    """A `Decoder` over pages; all rows have the same adapter.

    A seat is the index of a row's recurrent state, in models that have one, and of its open page in a 4-bit cache.

    Attributes:
        caches: keys and values [P, Hk, PAGE, D] of each layer, its `Cache4`, or its `States`; empty until `make_pages`.
        pages, seats: number allocated, the reserved ones included.
    """

    def __init__(
        self, model: Any, adapter: str | None, positions: int, cache_dtype: torch.dtype | None, unpacked: bool
    ):
        super().__init__(model, [adapter], positions, unpacked)
        self.positions = positions
        self.unpacked = unpacked
        self.cache_dtype = cache_dtype or self.dtype
        self.caches: list[Any] = []
        self.pages = self.seats = 0
        self.delta_layers = [layer for layer in self.layers if isinstance(layer, DeltaNetLayer)]

    @property
    def page_bytes(self) -> int:
        return sum(page_bytes(*layer.cache_shape, self.cache_dtype) for layer in self.attention_layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of a seat in all layers; 0 without recurrent layers or open pages."""
        states = sum(state_bytes(layer.inputs.module, self.dtype) for layer in self.delta_layers)
        if self.cache_dtype is INT4:
            states += sum(page_bytes(*layer.cache_shape, self.dtype) for layer in self.attention_layers)
        return states

    def make_pages(self, count: int, seats: int) -> None:
        """Allocate `count` pages and `seats` recurrent states; see `schedule.Schedule`."""
        self.caches = []  # free the old caches first
        self.pages = count
        self.seats = seats
        for layer in self.layers:
            if isinstance(layer, DeltaNetLayer):
                self.caches.append(layer.inputs.states(seats, self.device))
                continue
            assert isinstance(layer, AttentionLayer)
            heads, size = layer.cache_shape
            if self.cache_dtype is INT4:
                self.caches.append(Cache4.zeros(count, seats, heads, size, self.dtype, self.device))
                continue
            shape = count, heads, PAGE, size
            keys, values = (torch.zeros(shape, dtype=self.cache_dtype, device=self.device) for _ in range(2))
            self.caches.append((keys, values))

    def prefill(
        self,
        documents: Sequence[tuple[Sequence[int], Sequence[int], int]],
        images: Mapping[int, ImagePrompt] = {},
    ) -> Tensor:
        """Return logits [documents, V] after the last token of each document (tokens, pages, seat).

        Args:
            images: number of a document → the prompt with images that it begins with.
        """
        lengths = [len(tokens) for tokens, _, _ in documents]
        flat = [token for tokens, _, _ in documents for token in tokens]
        positions = [at for length in lengths for at in range(length)]
        shifts = [images[at].shift if at in images else 0 for at, length in enumerate(lengths) for _ in range(length)]
        pages = [document_pages[at // PAGE] for tokens, document_pages, _ in documents for at in range(len(tokens))]
        if self.device.type == "cpu" and len(flat) < MIN_CPU_ROWS:
            missing = MIN_CPU_ROWS - len(flat)
            lengths.append(missing)
            flat += [0] * missing
            positions += range(missing)
            pages += [0] * missing
            shifts += [0] * missing
        columns = to_device([flat, positions, pages, shifts], self.device)
        tokens, position_ids, pages_of_tokens, shift = columns.unbind(0)
        slots, bounds = position_ids % PAGE, [0, *accumulate(lengths)]
        on_device = to_device(bounds, self.device)

        seats = [seat for _, _, seat in documents]
        ends, rows = on_device.int(), self._rows(bounds, seats) if self.delta_layers else []
        by_document = [(begin, len(t), p, seat) for begin, (t, p, seat) in zip(bounds, documents, strict=False)]
        prompts = Prompts.of(by_document, self.device) if self.cache_dtype is INT4 else None
        placed = [PlacedPrompt(0, bounds[number], prompt) for number, prompt in images.items()]
        seeing = {prompt.begin: prompt.prompt.image for prompt in placed if self.bidirectional_images}

        def attend(number: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            if prompts is None:
                q, k = self._rotate_and_store(number, layer, q, k, v, angles, pages_of_tokens, slots)
            else:
                q, k = self.rotated(layer, q, k, angles)
                store_prompts4_(self.caches[number], prompts, k[0].transpose(0, 1), v[0].transpose(0, 1))
            return _over_documents(layer, q, k, v, bounds, ends, seeing)

        def recur(number: int, layer: DeltaNetLayer, x: Tensor) -> Tensor:
            return layer.inputs.prompts(x, rows, self.caches[number])

        rotated = (position_ids + shift).clamp_(min=0)  # an image's own positions replace those of its prompt
        hidden = self.forward(tokens.unsqueeze(0), rotated.unsqueeze(0), attend, recur, placed)[0]
        last = hidden[on_device[1 : len(documents) + 1] - 1]
        if self.device.type == "cpu" and len(last) < MIN_CPU_ROWS:
            last = torch.cat([last, last.new_zeros(MIN_CPU_ROWS - len(last), last.shape[1])])
        return self.logits(last.unsqueeze(1))[: len(documents)]

    def _rows(self, bounds: Sequence[int], seats: Sequence[int]) -> list[Rows]:
        """Group documents of similar length; documents beyond the seats are padding and use seat 0."""
        seat_of = dict(zip(bounds, seats, strict=False))
        groups = []
        for index, real in length_groups(list(bounds)):
            group_seats = to_device([seat_of.get(begin, 0) for begin in index[:, 0].tolist()], self.device)
            groups.append(Rows.of(index.to(self.device), real.to(self.device), group_seats))
        return groups

    def _rotate_and_store(
        self,
        number: int,
        layer: AttentionLayer,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Angles,
        pages: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return q and k as `rotated` does, and write k and v to the cache."""
        if layer.plain_rope:
            rope_store_paged_(q, k, v, *angles, *self.caches[number], pages, slots)
            return q, k
        q, k = self.rotated(layer, q, k, angles)
        store_paged(*self.caches[number], pages, slots, *(x.transpose(1, 2).flatten(0, 1) for x in (k, v)))
        return q, k

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits in the GEMM's dtype if the head only multiplies; the sampler upcasts to fp32."""
        return self.head(hidden)[0][:, 0] if self.to_logits == Head() else super().logits(hidden)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the tokens of the first page to the second for each pair (from, to); open pages belong to seats."""
        if self.cache_dtype is not INT4:
            attending = zip(self.layers, self.caches, strict=True)
            self._copy([cache for layer, cache in attending if isinstance(layer, AttentionLayer)], pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy the states and open pages of the first seat to the second for each pair (from, to)."""
        states = [cache for layer, cache in zip(self.layers, self.caches, strict=True) if layer in self.delta_layers]
        self._copy([*states, *(cache.of_sequences for cache in self.caches if isinstance(cache, Cache4))], pairs)

    def _copy(self, caches: Sequence[Sequence[Tensor]], pairs: Sequence[tuple[int, int]]) -> None:
        source, target = to_device(pairs, self.device).unbind(1)
        for cache in chain.from_iterable(caches):
            as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            as_bytes[target] = as_bytes[source]

    def step(
        self,
        tokens: Tensor,
        lengths: Tensor,
        tables: Tensor,
        shared: Shared | None = None,
        seats: Any = None,
        shifts: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, V] after one more token of each row.

        Args:
            tokens: int64 [R].
            lengths: int32 [R], tokens of each row before this one.
            tables: int32 [R, M], pages of each row.
            shared: bundles of rows with common pages, which are then read once per bundle.
            seats: int64 [R]; unused without recurrent layers or open pages.
            shifts: int32 [R], see `ImagePrompt.shift`; None: 0.
        """
        position_ids = lengths.long()
        pages = tables.gather(1, (position_ids // PAGE).unsqueeze(1)).squeeze(1).long()
        slots, seen = position_ids % PAGE, lengths + 1

        def attend(number: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            cache, options = self.caches[number], (*layer.scores, shared, layer.sinks)
            if isinstance(cache, Cache4):
                q, k = self.rotated(layer, q, k, angles)
                append4_(k[:, :, 0], v[:, :, 0], cache, pages, slots, seats)
                return paged_attention4(q[:, :, 0], cache, tables, seen, seats, *options).unsqueeze(2)
            q, _ = self._rotate_and_store(number, layer, q, k, v, angles, pages, slots)
            return paged_attention(q[:, :, 0], *cache, tables, seen, *options).unsqueeze(2)

        def recur(number: int, layer: DeltaNetLayer, x: Tensor) -> Tensor:
            return layer.inputs.step(x, self.caches[number], seats)

        rotated = position_ids if shifts is None else position_ids + shifts
        return self.logits(self.forward(tokens.unsqueeze(1), rotated.unsqueeze(1), attend, recur))


def _over_documents(
    layer: AttentionLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: list[int],
    on_device: Tensor,
    images: Mapping[int, Tensor],
) -> Tensor:
    """Causal attention [1, Hq, N, D] within documents; q [1, Hq, N, D], k and v [1, Hk, N, D].

    Args:
        bounds: first token of each document, and N; `on_device` holds them on the device.
        images: first token of a document → numbers of the images that its first tokens belong to, whose tokens see each
            other (`ImagePrompt.image`).
    """
    view = layer.attention
    custom = layer.has_custom_scores and not images
    out = scored_attention(layer, q, k, v, spans(on_device, q.shape[2])) if custom else None
    if out is not None:
        return out
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and not layer.has_custom_scores and not images:
        longest = max(end - begin for begin, end in pairwise(bounds))
        query, key, value = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        out = varlen_attention(query, key, value, on_device, longest, view.scaling, view.window)
        return out.transpose(0, 1).unsqueeze(0)
    outs = []
    for begin, end in pairwise(bounds):
        at = torch.arange(end - begin, device=q.device)
        seen = at <= at.unsqueeze(1)
        if view.window is not None:
            seen &= at > at.unsqueeze(1) - view.window
        if begin in images:
            image = F.pad(images[begin], (0, end - begin - len(images[begin])), value=-1)
            seen |= (image == image.unsqueeze(1)) & (image >= 0)
        document_q, document_k, document_v = (x[:, :, begin:end] for x in (q, k, v))
        outs.append(prompt_attention(layer, document_q, document_k, document_v, seen))
    return torch.cat(outs, dim=2)
