"""The decoder over pages: prompts of any lengths side by side, then one token of every row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ..autograd.attention import varying
from ..modeling.head import Head
from ..modeling.packed_forwards import length_groups
from ..ops.attention import spans
from ..ops.paged_attention import PAGE, Shared, paged_attention, rope_store_paged_, store_paged
from .decoder import Angles, Attending, Decoder, Recurring, prompt_attention, scored_attention
from .delta_net import Rows, state_bytes

LEAST_ROWS = (
    4  # of a product on a CPU: below, MKL sums in another order, and a row's numbers would depend on the others
)


def page_bytes(layers: Sequence[Attending], dtype: torch.dtype) -> int:
    """Bytes of a page in all layers."""
    return sum(2 * PAGE * each.attention.key_heads * each.attention.head_dim * dtype.itemsize for each in layers)


def to_device(values: Any, device: torch.device) -> Tensor:
    """A tensor of numbers, without waiting for what the device does."""
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PagedDecoder(Decoder):
    """As `Decoder`; every row has the same adapter.

    Attributes:
        caches: keys and values [P, Hk, PAGE, D] of each layer, or its `States`; none until `make_pages`.
    """

    def __init__(
        self, model: Any, adapter: str | None, positions: int, cache_dtype: torch.dtype | None, unpacked: bool
    ):
        super().__init__(model, [adapter], positions, unpacked)
        self.positions, self.unpacked, self.cache_dtype = positions, unpacked, cache_dtype or self.dtype
        self.caches: list[Any] = []
        self.pages = self.seats = 0  # that there is memory for now, those included that are nobody's
        self.recurring = [layer for layer in self.layers if isinstance(layer, Recurring)]

    @property
    def page_bytes(self) -> int:
        return page_bytes(self.attending, self.cache_dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of a seat in all layers; 0: no layer has a state."""
        return sum(state_bytes(layer.inputs.module, self.dtype) for layer in self.recurring)

    def make_pages(self, count: int, seats: int) -> None:
        """Seats are of rows at once; see `schedule.Schedule`."""
        self.caches, self.pages, self.seats = [], count, seats  # their memory is free for the new ones
        for layer in self.layers:
            if isinstance(layer, Recurring):
                self.caches.append(layer.inputs.states(seats, self.device))
                continue
            assert isinstance(layer, Attending)
            shape = count, layer.attention.key_heads, PAGE, layer.attention.head_dim
            keys, values = (torch.zeros(shape, dtype=self.cache_dtype, device=self.device) for _ in range(2))
            self.caches.append((keys, values))

    def prefill(self, documents: Sequence[tuple[Sequence[int], Sequence[int], int]]) -> Tensor:
        """Logits [documents, V] behind the last token of each document (tokens, pages, seat)."""
        lengths = [len(tokens) for tokens, _, _ in documents]
        flat = [token for tokens, _, _ in documents for token in tokens]
        positions = [at for length in lengths for at in range(length)]
        pages = [page for (tokens, own, _) in documents for at in range(len(tokens)) for page in (own[at // PAGE],)]
        if self.device.type == "cpu" and len(flat) < LEAST_ROWS:
            beside = LEAST_ROWS - len(flat)
            lengths, flat, pages = [*lengths, beside], flat + [0] * beside, pages + [0] * beside
            positions += range(beside)
        tokens, places, pages_of_tokens = to_device([flat, positions, pages], self.device).unbind(0)
        slots, bounds = places % PAGE, [0, *accumulate(lengths)]
        on_device = to_device(bounds, self.device)

        ends, rows = on_device.int(), self._rows(bounds, [seat for _, _, seat in documents]) if self.recurring else []

        def attend(number: int, layer: Attending, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            q, k = self._kept(number, layer, q, k, v, angles, pages_of_tokens, slots)
            return _over_documents(layer, q, k, v, bounds, ends)

        def recur(number: int, layer: Recurring, x: Tensor) -> Tensor:
            return layer.inputs.prompts(x, rows, self.caches[number])

        hidden = self.forward(tokens.unsqueeze(0), places.unsqueeze(0), attend, recur)[0]
        last = hidden[on_device[1 : len(documents) + 1] - 1]
        return self.logits(self._enough(last).unsqueeze(1))[: len(documents)]

    def _rows(self, bounds: Sequence[int], seats: Sequence[int]) -> list[Rows]:
        """Documents of like length together; those beyond the seats have none."""
        seat_of = dict(zip(bounds, seats, strict=False))
        found = []
        for index, real in length_groups(list(bounds)):
            own = to_device([seat_of.get(begin, 0) for begin in index[:, 0].tolist()], self.device)
            found.append(Rows.of(index.to(self.device), real.to(self.device), own))
        return found

    def _kept(
        self,
        number: int,
        layer: Attending,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: Angles,
        pages: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """q and k as `rotated` gives them; k and v go into the cache."""
        if layer.plain_rope:
            rope_store_paged_(q, k, v, *angles, *self.caches[number], pages, slots)
            return q, k
        q, k = self.rotated(layer, q, k, angles)
        store_paged(*self.caches[number], pages, slots, *(each.transpose(1, 2).flatten(0, 1) for each in (k, v)))
        return q, k

    def logits(self, hidden: Tensor) -> Tensor:
        """As products leave them where the head does no more than that: who draws computes in fp32."""
        return self.head(hidden)[0][:, 0] if self.to_logits == Head() else super().logits(hidden)

    def _enough(self, rows: Tensor) -> Tensor:
        """On a CPU rows of zeros beside a few; see `LEAST_ROWS`."""
        short = LEAST_ROWS - len(rows) if self.device.type == "cpu" else 0
        return rows if short <= 0 else torch.cat([rows, rows.new_zeros(short, rows.shape[1])])

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Of each pair (from, to), the first page's tokens into the second."""
        self._copy(Attending, pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Of each pair (from, to), the state of the first seat to the second."""
        self._copy(Recurring, pairs)

    def _copy(self, kind: type, pairs: Sequence[tuple[int, int]]) -> None:
        source, target = to_device(pairs, self.device).unbind(1)
        own = [pair for layer, pair in zip(self.layers, self.caches, strict=True) if isinstance(layer, kind)]
        for cache in (each for pair in own for each in pair):
            as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            as_bytes[target] = as_bytes[source]

    def step(
        self, tokens: Tensor, lengths: Tensor, tables: Tensor, shared: Shared | None = None, seats: Any = None
    ) -> Tensor:
        """Logits [R, V] behind one more token of each row.

        Args:
            tokens: int64 [R].
            lengths: int32 [R]: tokens of each row before it.
            tables: int32 [R, M]: pages of each row.
            shared: those that rows have in common, where they shall be read once for all of these.
            seats: int64 [R], of each row; not read where no layer has a state.
        """
        places = lengths.long()
        pages = tables.gather(1, (places // PAGE).unsqueeze(1)).squeeze(1).long()
        slots, seen = places % PAGE, lengths + 1

        def attend(number: int, layer: Attending, q: Tensor, k: Tensor, v: Tensor, angles: Angles) -> Tensor:
            q, _ = self._kept(number, layer, q, k, v, angles, pages, slots)
            over = *self.caches[number], tables, seen, *layer.scores, shared, layer.sinks
            return paged_attention(q[:, :, 0], *over).unsqueeze(2)

        def recur(number: int, layer: Recurring, x: Tensor) -> Tensor:
            return layer.inputs.step(x, self.caches[number], seats)

        return self.logits(self.forward(tokens.unsqueeze(1), places.unsqueeze(1), attend, recur))


def _over_documents(layer: Attending, q: Tensor, k: Tensor, v: Tensor, bounds: list[int], on_device: Tensor) -> Tensor:
    """Causal attention [1, Hq, N, D] within documents; q [1, Hq, N, D], k and v [1, Hk, N, D]."""
    view = layer.attention
    found = scored_attention(layer, q, k, v, spans(on_device, q.shape[2])) if layer.scored else None
    if found is not None:
        return found
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and not layer.scored:
        longest = max(end - begin for begin, end in pairwise(bounds))
        query, key, value = (each[0].transpose(0, 1).contiguous() for each in (q, k, v))
        out = varying(query, key, value, on_device, longest, view.scaling, view.window)
        return out.transpose(0, 1).unsqueeze(0)
    outs = []
    for begin, end in pairwise(bounds):
        at = torch.arange(end - begin, device=q.device)
        seen = at <= at.unsqueeze(1)
        if view.window is not None:
            seen &= at > at.unsqueeze(1) - view.window
        own_q, own_k, own_v = (each[:, :, begin:end] for each in (q, k, v))
        outs.append(prompt_attention(layer, own_q, own_k, own_v, seen))
    return torch.cat(outs, dim=2)
