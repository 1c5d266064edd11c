"""Dropout whose masks are functions of a seed and an element's position, so that no mask is saved or read.

The forward and the backward compute the same mask wherever they need one: inside the low-rank GEMMs of adapters, or in
an elementwise kernel. All kernels compute equal masks. Seeds are drawn from torch's generator of the device, whose
state is in checkpoints, is restored for recomputation, and is advanced by each replay of a CUDA graph.

With a 64-bit seed of halves s₀ (low) and s₁, 32-bit unsigned arithmetic, and MurmurHash3's finalizer `fmix`:

    k₁ = fmix(row + fmix(s₀))    k₂ = k₁·0x9e3779b9 + fmix(s₁)
    h = (column ^ k₁)·0x7feb352d    h = (h ^ h ≫ 15 ^ k₂)·0x846ca68b    dropped: h < probability·2³²

Two multiplications per element are about half the instructions of Philox, and no lane needs another lane's words.

Sources: dropout (Srivastava et al. 2014); counter-based generators (Salmon et al. 2011); the multipliers are those of
C. Wellons' lowbias32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op

WORD = 0xFFFFFFFF
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9
MURMUR = 0x85EBCA6B, 0xC2B2AE35


class Dropout(NamedTuple):
    """Masks of several adapters of one input.

    Args:
        probability: of dropping an element.
        seeds: int64 [n], not negative, one per adapter.
        first_column: index of the input's first column, where a rank has some of the columns.
    """

    probability: float
    seeds: Tensor
    first_column: int = 0

    @classmethod
    def drawn(cls, probability: float, count: int, device: torch.device, first_column: int = 0) -> Dropout:
        """Masks of `count` adapters, with new seeds from the device's generator."""
        return cls(probability, torch.empty(count, dtype=torch.int64, device=device).random_(), first_column)

    def of(self, first: int, last: int | None = None) -> Dropout:
        """Masks of the adapters [first, last); default: of one adapter."""
        return self._replace(seeds=self.seeds[first : first + 1 if last is None else last])

    @property
    def threshold(self) -> int:
        """The smallest hash of an element that is not dropped."""
        return min(round(self.probability * 2**32), WORD)

    @property
    def scale(self) -> float:
        """Factor of the elements that are not dropped."""
        return 1 / (1 - self.probability) if self.probability < 1 else 0.0


def _fmix(h: Tensor) -> Tensor:
    h = (h ^ h >> 16) * MURMUR[0] & WORD
    h = (h ^ h >> 13) * MURMUR[1] & WORD
    return h ^ h >> 16


def keep_mask(dropout: Dropout, row: Tensor, columns: int) -> Tensor:
    """The first mask of `dropout` as bool [M, columns] for rows of these int64 indices [M]; False: dropped."""
    seed = dropout.seeds[0]
    column = torch.arange(dropout.first_column, dropout.first_column + columns, device=seed.device)
    first_key = _fmix(row + _fmix(seed & WORD) & WORD)
    second_key = first_key * GOLDEN + _fmix(seed >> 32) & WORD
    h = (column ^ first_key[:, None]) * FIRST_MULTIPLIER & WORD
    h = (h ^ h >> 15 ^ second_key[:, None]) * SECOND_MULTIPLIER & WORD
    return h >= dropout.threshold


@op("triton.dropout", "native.dropout")
def drop(x: Tensor, dropout: Dropout, rows: Tensor | None = None) -> Tensor:
    """x after dropout with the first mask of `dropout`; also maps a gradient of the result to that of x.

    Args:
        x: [M, K] float with adjacent columns.
        rows: int32 or int64 [M], the rows of the mask; default: 0 to M - 1.

    Returns:
        A new tensor like x: x/(1 - probability), rounded once, or 0 where an element is dropped.
    """
    row = torch.arange(x.shape[0], device=x.device) if rows is None else rows.long()
    return torch.where(keep_mask(dropout, row, x.shape[1]), x * dropout.scale, 0.0)


@op("triton.dropped_lora")
def dropped_products(x: Tensor, factors: Sequence[Tensor], dropout: Dropout) -> Tensor:
    """[drop₁(x)·A₁ᵀ, drop₂(x)·A₂ᵀ, …].

    Args:
        x: [M, K] float with adjacent columns.
        factors: A of each adapter, [rᵢ, K] each, views of one contiguous [R, K] in their order, in x's dtype.

    Returns:
        [M, R] in x's dtype.
    """
    ranks = [factor.shape[0] for factor in factors]
    out = x.new_empty(x.shape[0], sum(ranks))
    for i, (factor, part) in enumerate(zip(factors, out.split(ranks, dim=1), strict=True)):
        part.addmm_(drop(x, dropout.of(i)), factor.t(), beta=0)
    return out


@op("triton.dropped_lora")
def dropped_gradients(
    v: Tensor, factors: Sequence[Tensor], dropout: Dropout, x: Tensor | None, dx: Tensor | None, accumulate: bool
) -> list[Tensor | None]:
    """Gradients of `dropped_products` for gradients v of its result.

    Args:
        v: [M, R] contiguous.
        factors: as in `dropped_products`.
        x: its input; None: the gradients of the factors are not needed.
        dx: [M, K] contiguous, in v's dtype: receives Σ dropᵢ(vᵢ·Aᵢ); None: not needed.
        accumulate: whether to add to dx instead of overwriting it.

    Returns:
        dAᵢ = vᵢᵀ·dropᵢ(x) [rᵢ, K], in fp32 (fp64 for fp64); None each without x.
    """
    ranks = [factor.shape[0] for factor in factors]
    exact = torch.promote_types(v.dtype, torch.float32)
    gradients: list[Tensor | None] = []
    for i, (factor, part) in enumerate(zip(factors, v.split(ranks, dim=1), strict=True)):
        mask = dropout.of(i)
        gradients.append(None if x is None else (part.t() @ drop(x, mask)).to(exact))
        if dx is not None:
            term = drop(part @ factor, mask)
            if accumulate or i:
                dx.add_(term)
            else:
                dx.copy_(term)
    return gradients
