"""Experts of a mixture: which rows go to which, products of each with its rows, and what tokens get back.

T tokens choose k of E experts each, which makes S = T·k slots; slot t·k + j is token t's j-th choice. Sorted by expert,
and by slot within one, they are the S rows that all products work on. With x [T, K] and a stack W [E, N, K]:

    grouped            y_p = x_p·W_eᵀ + s·u_p·B_eᵀ + b_e         p a row of expert e
    grouped, turned    y_p = x_p·W_e  + s·u_p·A_e                x_p [N], y_p [K]
    outer              G_e = Σ_p a_pᵀ·b_p                        over the rows of expert e; zeros where there are none
    combine            out_t = Σ_j w_tj·y_place(t, j)            in the order of j

Where x has a row a token, row p reads that of its token: nothing makes copies of x. No shape follows from where tokens
go, so nothing waits for the device, and a CUDA graph can hold all of it. Sums have one order: equal runs, equal bits.

Source: mixtures by sorting, MegaBlocks (Gale et al. 2022, arXiv:2211.15841, §5); counting sort, Knuth 5.2, algorithm D.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .rows import linear, multiplies_by_onednn

if TYPE_CHECKING:
    from ..formats import Format


class StackedWeight(NamedTuple):
    """The weights of a layer's experts, K contiguous.

    Args:
        parts: of its format; {"values": [E, N, K]} where it has none.
        shape: (E, N, K).
        format: None for plain values.
    """

    parts: Mapping[str, Tensor]
    shape: tuple[int, int, int]
    format: Format | None = None

    @classmethod
    def plain(cls, values: Tensor) -> StackedWeight:
        """Of values [E, N, K] as they stand."""
        experts, rows, columns = values.shape
        return cls({"values": values.contiguous()}, (experts, rows, columns))

    def values(self, dtype: torch.dtype) -> Tensor:
        """`dtype` [E, N, K]."""
        if self.format is None:
            return self.parts["values"].to(dtype)
        return self.format.dequantize(self.parts, self.shape, dtype)

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """`dtype` [N, K]: one of them."""
        if self.format is None:
            return self.parts["values"][index].to(dtype)
        format_, parts = self.format.expert(self.parts, self.shape, index)
        return format_.dequantize(parts, self.shape[1:], dtype)


class Routing(NamedTuple):
    """The slots of T tokens sorted by expert; indices are int32.

    Args:
        order: [S], the slot of each row.
        place: [S], the row of each slot.
        offsets: [E + 1], where each expert's rows begin, and the end.
        tiles: [n, 2], expert and first row of each tile of `tile_rows` rows; expert E: none. Empty where no kernel
            asks for it.
        tile_rows: 0 likewise.
        top_k: k.
    """

    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Tensor
    tile_rows: int
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """int32 [S]: the token of each row."""
        return self.order // self.top_k

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has rows, and its rows. Waits for the device: for references alone.

        Of tensors without data none: references then say shapes.
        """
        if self.offsets.is_meta:
            return
        for expert, (start, end) in enumerate(pairwise(self.offsets.tolist())):
            if start < end:
                yield expert, slice(start, end)


class LowRank(NamedTuple):
    """scale·u·F_e, added to a grouped product.

    Args:
        u: [S, r], in the dtype of the product.
        factor: [E, N, r], or [E, r, K] where the product is turned.
        scale: s.
    """

    u: Tensor
    factor: Tensor
    scale: float


def check_index(index: Tensor) -> None:
    """Raise unless `index` is [T, k] of integers."""
    if index.dim() != 2 or index.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"experts: top_k_index is {index.dtype} {list(index.shape)}", "pass int64 [tokens, k]")


@op("triton.experts")
def route(index: Tensor, experts: int) -> Routing:
    """Sort the slots of `index` [T, k], integers below `experts`, by expert: a stable counting sort."""
    check_index(index)
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=index.device))
    offsets = torch.searchsorted(chosen, torch.arange(experts + 1, device=index.device), out_int32=True)
    tiles = order.new_empty((0, 2), dtype=torch.int32)
    return Routing(order.int(), place.int(), offsets, tiles, 0, index.shape[1])


def check_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool,
    turned: bool,
    low_rank: LowRank | None,
    bias: Tensor | None,
) -> tuple[int, int]:
    """Rows and width of a grouped product's result.

    Raises:
        ModelError: an argument does not fit, by name.
    """
    experts, rows, columns = stack.shape
    depth, width = (rows, columns) if turned else (columns, rows)
    slots = routing.order.numel()
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "x": (x, (slots // max(routing.top_k, 1) if gather else slots, depth))
    }
    if low_rank is not None:
        rank = low_rank.u.shape[1]
        expected["u"] = (low_rank.u, (slots, rank))
        expected["factor"] = (low_rank.factor, (experts, rank, columns) if turned else (experts, rows, rank))
    if bias is not None:
        expected["bias"] = (bias, (experts, width))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype is not x.dtype:
            said = f"experts: {name} is {tensor.dtype} {list(tensor.shape)}, not {x.dtype} {list(shape)}"
            raise ModelError(said, f"pass {name} in that dtype and shape")
    if routing.offsets.numel() != experts + 1:
        said = f"experts: {routing.offsets.numel() - 1} are routed to, and the stack has {experts}"
        raise ModelError(said, "route to the experts of this stack")
    return slots, width


@op("cuda.grouped_gemm4", "native.grouped")
def multiplies_codes(part: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> bool:
    """Whether products of so many rows with a quantized stack's codes are as fast as with its values.

    Args:
        part: one of the stack's, which says where it is.
        dtype: of the products.
    """
    return part.is_cpu  # whose caches hold one expert


@op("triton.grouped", "cuda.grouped4", "cuda.grouped_gemm4", "native.grouped")
def grouped_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    turned: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """alpha·(x_p·W_eᵀ + s·u_p·B_eᵀ + b_e) of each row, or that of the turned product.

    Args:
        x: [S, ·] sorted rows, or with `gather` [T, ·], a row a token; float.
        stack: of E experts [N, K].
        gather: whether row p reads x of its token.
        turned: multiply by W_e instead of W_eᵀ.
        low_rank: added, or None.
        bias: [E, N] or None; not where the product is turned.

    Returns:
        [S, N], or [S, K] where it is turned, in x's dtype.
    """
    slots, width = check_product(x, stack, routing, gather, turned, low_rank, bias)
    out, tokens = x.new_empty(slots, width), routing.tokens if gather else None
    for expert, rows in routing.groups():
        part = x[rows] if tokens is None else x[tokens[rows]]
        weight = stack.expert(expert, x.dtype)
        weight = weight.t() if turned else weight
        into = out[rows]
        by_onednn = multiplies_by_onednn(part, weight)  # which adds nothing up with what is there
        if by_onednn:
            into.copy_(linear(part, weight))
        elif low_rank is None:
            torch.mm(part, weight.t(), out=into)
        if low_rank is not None:
            factor = low_rank.factor[expert] if turned else low_rank.factor[expert].t()
            into.addmm_(low_rank.u[rows], factor, beta=int(by_onednn), alpha=low_rank.scale)
            if not by_onednn:
                into.addmm_(part, weight.t())
        if bias is not None:
            into += bias[expert]
        if alpha != 1.0:
            into *= alpha
    return out


@op("triton.experts")
def grouped_outer(
    wide: Tensor, narrow: Tensor, routing: Routing, gather: bool, alpha: float, dtype: torch.dtype
) -> Tensor:
    """alpha·Σ_p wide_pᵀ·narrow_p over the rows of each expert; zeros where an expert has none.

    Args:
        wide: [S, W], or with `gather` [T, W], a row a token.
        narrow: [S, r], in its dtype.

    Returns:
        `dtype` [E, W, r].
    """
    experts = routing.offsets.numel() - 1
    out = wide.new_zeros((experts, wide.shape[1], narrow.shape[1]), dtype=dtype)
    exact = torch.promote_types(dtype, wide.dtype)
    for expert, rows in routing.groups():
        part = wide[routing.tokens[rows]] if gather else wide[rows]
        out[expert] = alpha * (part.to(exact).t() @ narrow[rows].to(exact))
    return out


@op("triton.experts", "native.experts")
def combine(rows: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    """Σ_j w_tj·rows_place(t, j), summed in fp32 in the order of j.

    Args:
        rows: [S, H], sorted.
        weights: [T, k] float; None: ones.

    Returns:
        [T, H], in the dtype of `rows`.
    """
    exact = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(rows.shape[0] // routing.top_k, rows.shape[1], dtype=exact, device=rows.device)
    for j, place in enumerate(routing.place.view(-1, routing.top_k).unbind(1)):
        chosen = rows[place].to(exact)
        total += chosen if weights is None else chosen * weights[:, j, None].to(exact)
    return total.to(rows.dtype)
