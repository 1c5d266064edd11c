"""Keys and values of past tokens in 4 bits, in pages: the specification.

As in KIVI (Liu et al. 2024, arXiv:2402.02750, section 3), keys have a range for each channel of a page and values one
for each token, because outliers of keys stay in a few channels. A page is quantized when its last token arrives; until
then its tokens are in 16 bits, in the open page of their sequence. Codes are affine, with 15 steps from the least value
to the largest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from .paged_attention import PAGE, Shared, paged_attention

STEPS = 15  # steps from the least to the largest value
LARGEST = 65504.0  # of fp16, the dtype of ranges


class Cache4(NamedTuple):
    """Keys and values of a layer: P full pages, and the open pages of S sequences. D is even.

    Attributes:
        keys, values: uint8 [P, H, PAGE, D / 2], codes of channels 2i (low bits) and 2i + 1.
        key_ranges: fp16 [P, H, 2, D], step and least value of each channel.
        value_ranges: fp16 [P, H, 2, PAGE], step and least value of each token.
        open_keys, open_values: [S, H, PAGE, D] in the model's dtype.
    """

    keys: Tensor
    values: Tensor
    key_ranges: Tensor
    value_ranges: Tensor
    open_keys: Tensor
    open_values: Tensor

    @classmethod
    def zeros(
        cls, pages: int, sequences: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> Cache4:
        codes = pages, heads, PAGE, size // 2
        ranges = (pages, heads, 2, size), (pages, heads, 2, PAGE)
        open_page = sequences, heads, PAGE, size
        return cls(
            *(torch.zeros(codes, dtype=torch.uint8, device=device) for _ in range(2)),
            *(torch.zeros(shape, dtype=torch.float16, device=device) for shape in ranges),
            *(torch.zeros(open_page, dtype=dtype, device=device) for _ in range(2)),
        )

    @property
    def of_pages(self) -> tuple[Tensor, ...]:
        """The tensors whose first dimension is P."""
        return self[:4]

    @property
    def of_sequences(self) -> tuple[Tensor, ...]:
        """The tensors whose first dimension is S."""
        return self[4:]


def quantize4(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 of x's shape, and fp16 step and least value of the ranges over `dim` (size 1 there)."""
    exact = x.float().clamp(-LARGEST, LARGEST)
    least, largest = exact.aminmax(dim=dim, keepdim=True)
    step, least = ((largest - least) / STEPS).half(), least.half()
    codes = ((exact - least.float()) / step.float().where(step > 0, 1) + 0.5).floor().clamp(0, STEPS)
    return codes.to(torch.uint8), torch.stack([step, least])


def dequantize4(codes: Tensor, ranges: Tensor) -> Tensor:
    """fp32 values [..., D] of packed codes [..., D / 2], and ranges that broadcast over them: step, least value."""
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return both * ranges[0].float() + ranges[1].float()


def packed4(codes: Tensor) -> Tensor:
    """Pack pairs of neighbouring codes [..., D] in bytes [..., D / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def close_pages4_(cache: Cache4, pages: Tensor, keys: Tensor, values: Tensor) -> None:
    """Quantize full pages [N, H, PAGE, D] to pages int64 [N] of the cache."""
    codes, ranges = quantize4(keys, dim=2)
    cache.keys[pages], cache.key_ranges[pages] = packed4(codes), ranges[:, :, :, 0].movedim(0, 2)
    codes, ranges = quantize4(values, dim=3)
    cache.values[pages], cache.value_ranges[pages] = packed4(codes), ranges[:, :, :, :, 0].movedim(0, 2)


class Prompts(NamedTuple):
    """Where the tokens of new sequences belong, as indices of all N tokens.

    Attributes:
        full: int64 [F · PAGE], the tokens of full pages, page after page.
        pages: int64 [F], the pages that they fill.
        last: int64 [L], the tokens of open pages.
        sequences, slots: int64 [L], their sequences and slots.
    """

    full: Tensor
    pages: Tensor
    last: Tensor
    sequences: Tensor
    slots: Tensor

    @classmethod
    def of(cls, documents: Sequence[tuple[int, int, Sequence[int], int]], device: torch.device) -> Prompts:
        """Prompts given as (index of the first token, number of tokens, pages, sequence)."""
        full: list[range] = []
        pages: list[int] = []
        last: list[tuple[int, int, int]] = []
        for begin, length, document_pages, sequence in documents:
            count = length // PAGE
            full.append(range(begin, begin + count * PAGE))
            pages.extend(document_pages[:count])
            last += [(begin + at, sequence, at % PAGE) for at in range(count * PAGE, length)]
        columns = torch.tensor(last, dtype=torch.int64).view(-1, 3).T.to(device)
        indices = (torch.tensor(numbers, dtype=torch.int64, device=device) for numbers in ([*chain(*full)], pages))
        return cls(*indices, *columns.unbind(0))


def store_prompts4_(cache: Cache4, prompts: Prompts, k: Tensor, v: Tensor) -> None:
    """Write the keys and values [N, H, D] of new sequences into a cache."""
    if len(prompts.pages):
        close_pages4_(cache, prompts.pages, *(x[prompts.full].unflatten(0, (-1, PAGE)).transpose(1, 2) for x in (k, v)))
    for open_pages, new in zip(cache.of_sequences, (k, v), strict=True):
        open_pages[prompts.sequences, :, prompts.slots] = new[prompts.last]


@op("triton.cached_attention")
def append4_(k: Tensor, v: Tensor, cache: Cache4, pages: Tensor, slots: Tensor, sequences: Tensor) -> None:
    """Write one new token of each sequence into a cache; its page is quantized with its last token.

    Args:
        k, v: [N, H, D] in the model's dtype.
        pages, slots: int64 [N], the destination of each token.
        sequences: int64 [N].
    """
    for open_pages, new in zip(cache.of_sequences, (k, v), strict=True):
        open_pages[sequences, :, slots] = new
    full = slots == PAGE - 1
    close_pages4_(cache, pages[full], *(open_pages[sequences[full]] for open_pages in cache.of_sequences))


@op("triton.cached_attention")
def paged_attention4(
    q: Tensor,
    cache: Cache4,
    tables: Tensor,
    lengths: Tensor,
    sequences: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    shared: Shared | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_attention` over a cache in 4 bits.

    Args:
        q: [R, Hq, D]; fp32, fp16 or bf16.
        tables, lengths: as in `paged_attention`.
        sequences: int64 [R], whose open pages have the tokens after the last full page.
        scale, window, softcap, shared, sinks: as in `paged_attention`.

    Returns:
        [R, Hq, D] in q's dtype.
    """
    rows, width = tables.shape
    used, row = tables.flatten().long(), torch.arange(rows, device=q.device)
    key_ranges = cache.key_ranges[used].movedim(2, 0).unsqueeze(-2)
    value_ranges = cache.value_ranges[used].movedim(2, 0).unsqueeze(-1)
    keys = dequantize4(cache.keys[used], key_ranges).to(q.dtype)
    values = dequantize4(cache.values[used], value_ranges).to(q.dtype)
    unfinished = lengths % PAGE > 0
    at = (row * width + lengths // PAGE)[unfinished]
    for pages, open_pages in zip((keys, values), cache.of_sequences, strict=True):
        pages[at] = open_pages[sequences[unfinished]].to(q.dtype)
    own_pages = torch.arange(rows * width, dtype=torch.int32, device=q.device).view(rows, width)
    return paged_attention.reference(q, keys, values, own_pages, lengths, scale, window, softcap, shared, sinks)
