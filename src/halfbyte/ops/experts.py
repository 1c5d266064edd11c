"""Mixture of experts: routing of tokens to experts, grouped GEMMs, and combination of the experts' outputs.

T tokens choose k of E experts each, which gives S = T·k slots; slot t·k + j is token t's j-th choice. All GEMMs use
the S rows sorted by expert, and by slot within an expert. With x [T, K] and a stack W [E, N, K]:

    grouped                y_p = x_p·W_eᵀ + s·u_p·B_eᵀ + b_e         p a row of expert e
    grouped, transposed    y_p = x_p·W_e  + s·u_p·A_e                x_p [N], y_p [K]
    outer                  G_e = Σ_p a_pᵀ·b_p                        over the rows of expert e; zeros without rows
    combine                out_t = Σ_j w_tj·y_row(t, j)            in the order of j

Where x has one row per token, row p reads its token's row; x is never copied. Shapes do not depend on the routing, so
nothing synchronises with the device and a CUDA graph can capture everything. Sums have a fixed order: equal runs give
equal bits.

Between an expert's two GEMMs is a gated unit over rows c [S, 2I] that hold gate and up:

    g = min(gate, limit)      u = clamp(up, −limit, limit)      h = a(g)·(u + offset)

with a as in `ops.glu`, where silu is g·σ(α·g). SwiGLU and GeGLU have α = 1, no limit and offset 0; gpt-oss has
α = 1.702, limit 7 and offset 1 (its model card, arXiv:2508.10925, §2.1). As with torch.clamp, a value at its limit has
a gradient, a value beyond it has none.

Backward receives z = ∂L/∂y·W of the second GEMM, before multiplication by the routing weight w. For each row

    ∂L/∂w = ⟨z, h⟩      dh = w·z      dgate, dup overwrite gate and up      h overwrites z

so the gradient of w does not need the second GEMM's result (SonicMoE, arXiv:2512.14080, §3).

Source: mixtures by sorting, MegaBlocks (Gale et al. 2022, arXiv:2211.15841, §5); counting sort, Knuth 5.2, algorithm D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op
from ..formats.linear import linear, multiplies_by_onednn
from ..utils.errors import ModelError
from .glu import ACTIVATIONS, Activation, activation_and_derivative, glu

if TYPE_CHECKING:
    from ..formats import Format


# Mean rows per expert up to which GEMMs decode a stack in each tile. With more, it is dequantized once per GEMM, for
# kernels that do not overlap the decoding. Triton, forward and backward of a layer of Qwen3-30B-A3B in NF4 on an H200,
# dequantized first / in each tile: 64 rows 2.17 / 2.14 ms, 128 2.32 / 2.54, 256 3.05 / 4.00, 512 4.44 / 6.67.
DECODED_ROWS = 64


class StackedWeight(NamedTuple):
    """The weights of a layer's experts, K contiguous.

    Args:
        parts: tensors of its format; {"values": [E, N, K]} without a format.
        shape: (E, N, K).
        format: None for unquantized values.
    """

    parts: Mapping[str, Tensor]
    shape: tuple[int, int, int]
    format: Format | None = None

    @classmethod
    def plain(cls, values: Tensor) -> StackedWeight:
        """Wrap unquantized values [E, N, K]."""
        experts, rows, columns = values.shape
        return cls({"values": values.contiguous()}, (experts, rows, columns))

    def values(self, dtype: torch.dtype) -> Tensor:
        """Dequantized weights, `dtype` [E, N, K]."""
        if self.format is None:
            return self.parts["values"].to(dtype)
        return self.format.dequantize(self.parts, self.shape, dtype)

    def expert(self, index: int, dtype: torch.dtype) -> Tensor:
        """Dequantized weight of one expert, `dtype` [N, K]."""
        if self.format is None:
            return self.parts["values"][index].to(dtype)
        format_, tensors = self.format.expert(self.parts, self.shape, index)
        return format_.dequantize(tensors, self.shape[1:], dtype)


class Routing(NamedTuple):
    """Slots of T tokens sorted by expert; indices are int32.

    Args:
        order: [S], the slot of each row.
        row_of_slot: [S], the row of each slot.
        offsets: [E + 1], the first row of each expert, then S.
        tiles: [n, 2], expert and first row of each tile of `tile_rows` rows; expert E marks an unused tile. Empty where
            no kernel uses tiles.
        tile_rows: rows of a tile; 0 without tiles.
        top_k: k.
    """

    order: Tensor
    row_of_slot: Tensor
    offsets: Tensor
    tiles: Tensor
    tile_rows: int
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int32 [S]."""
        return self.order // self.top_k

    def groups(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert that has rows, with its rows. Synchronises with the device: for references only.

        Meta tensors have no groups; references then compute shapes only.
        """
        if self.offsets.is_meta:
            return
        for expert, (start, end) in enumerate(pairwise(self.offsets.tolist())):
            if start < end:
                yield expert, slice(start, end)


class LowRank(NamedTuple):
    """Low-rank term scale·u·F_e, added to a grouped GEMM.

    Args:
        u: [S, r], in the dtype of the GEMM.
        factor: [E, N, r], or [E, r, K] for a transposed GEMM.
        scale: s.
    """

    u: Tensor
    factor: Tensor
    scale: float


def check_index(index: Tensor) -> None:
    """Raise unless `index` is an integer tensor [T, k]."""
    if index.dim() != 2 or index.dtype not in (torch.int64, torch.int32):
        raise ModelError(f"experts: top_k_index is {index.dtype} {list(index.shape)}", "pass int64 [tokens, k]")


@op("triton.experts")
def route(index: Tensor, experts: int) -> Routing:
    """Sort the slots of `index` [T, k], integers below `experts`, by expert, with a stable counting sort."""
    check_index(index)
    chosen, order = torch.sort(index.reshape(-1), stable=True)
    row_of_slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=index.device))
    offsets = torch.searchsorted(chosen, torch.arange(experts + 1, device=index.device), out_int32=True)
    tiles = order.new_empty((0, 2), dtype=torch.int32)
    return Routing(order.int(), row_of_slot.int(), offsets, tiles, 0, index.shape[1])


def check_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool,
    transposed: bool,
    low_rank: LowRank | None,
    bias: Tensor | None,
) -> tuple[int, int]:
    """Check the arguments of a grouped GEMM, and return the rows and width of its result.

    Raises:
        ModelError: names the argument that does not fit.
    """
    experts, rows, columns = stack.shape
    depth, width = (rows, columns) if transposed else (columns, rows)
    slots = routing.order.numel()
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "x": (x, (slots // max(routing.top_k, 1) if gather else slots, depth))
    }
    if low_rank is not None:
        rank = low_rank.u.shape[1]
        expected["u"] = (low_rank.u, (slots, rank))
        expected["factor"] = (low_rank.factor, (experts, rank, columns) if transposed else (experts, rows, rank))
    if bias is not None:
        expected["bias"] = (bias, (experts, width))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype is not x.dtype:
            message = f"experts: {name} is {tensor.dtype} {list(tensor.shape)}, not {x.dtype} {list(shape)}"
            raise ModelError(message, f"pass {name} in that dtype and shape")
    if routing.offsets.numel() != experts + 1:
        message = f"experts: {routing.offsets.numel() - 1} are routed to, and the stack has {experts}"
        raise ModelError(message, "route to the experts of this stack")
    return slots, width


@op("cuda.experts4", "native.grouped")
def multiplies_codes(tensor: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> bool:
    """Return whether GEMMs of `slots` rows are as fast with a quantized stack's codes as with its dequantized values.

    Args:
        tensor: one of the stack's tensors, for its device.
        dtype: of the GEMMs.
    """
    # A CPU's caches hold one dequantized expert.
    return tensor.is_cpu or slots <= DECODED_ROWS * stack.shape[0]


@op("triton.grouped", "cuda.experts4", "native.grouped")
def grouped_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    transposed: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """alpha·(x_p·W_eᵀ + s·u_p·B_eᵀ + b_e) for each row p of expert e; with `transposed`, W_e instead of W_eᵀ.

    Args:
        x: [S, ·] sorted rows, or with `gather` [T, ·], one row per token; float.
        stack: E experts [N, K].
        gather: row p reads the x of its token.
        transposed: multiply by W_e instead of W_eᵀ.
        low_rank: low-rank term to add, or None.
        bias: [E, N] or None; not supported with `transposed`.

    Returns:
        [S, N], or [S, K] with `transposed`, in x's dtype.
    """
    slots, width = check_product(x, stack, routing, gather, transposed, low_rank, bias)
    out, tokens = x.new_empty(slots, width), routing.tokens if gather else None
    for expert, rows in routing.groups():
        expert_rows = x[rows] if tokens is None else x[tokens[rows]]
        weight = stack.expert(expert, x.dtype)
        weight = weight.t() if transposed else weight
        into = out[rows]
        by_onednn = multiplies_by_onednn(expert_rows, weight)  # which cannot accumulate into its output
        if by_onednn:
            into.copy_(linear(expert_rows, weight))
        elif low_rank is None:
            torch.mm(expert_rows, weight.t(), out=into)
        if low_rank is not None:
            factor = low_rank.factor[expert] if transposed else low_rank.factor[expert].t()
            into.addmm_(low_rank.u[rows], factor, beta=int(by_onednn), alpha=low_rank.scale)
            if not by_onednn:
                into.addmm_(expert_rows, weight.t())
        if bias is not None:
            into += bias[expert]
        if alpha != 1.0:
            into *= alpha
    return out


@op("triton.experts")
def grouped_outer(
    wide: Tensor, narrow: Tensor, routing: Routing, gather: bool, alpha: float, dtype: torch.dtype
) -> Tensor:
    """alpha·Σ_p wide_pᵀ·narrow_p over the rows of each expert; zeros for an expert without rows.

    Args:
        wide: [S, W], or with `gather` [T, W], one row per token.
        narrow: [S, r], in the dtype of `wide`.

    Returns:
        `dtype` [E, W, r].
    """
    experts = routing.offsets.numel() - 1
    out = wide.new_zeros((experts, wide.shape[1], narrow.shape[1]), dtype=dtype)
    exact = torch.promote_types(dtype, wide.dtype)
    for expert, rows in routing.groups():
        expert_rows = wide[routing.tokens[rows]] if gather else wide[rows]
        out[expert] = alpha * (expert_rows.to(exact).t() @ narrow[rows].to(exact))
    return out


@op("triton.experts", "native.experts")
def combine(rows: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    """Σ_j w_tj·rows_row(t, j), summed in fp32 in the order of j.

    Args:
        rows: [S, H], sorted.
        weights: [T, k] float; None: ones.

    Returns:
        [T, H], in the dtype of `rows`.
    """
    exact = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(rows.shape[0] // routing.top_k, rows.shape[1], dtype=exact, device=rows.device)
    for j, rows_of_choice in enumerate(routing.row_of_slot.view(-1, routing.top_k).unbind(1)):
        chosen = rows[rows_of_choice].to(exact)
        total += chosen if weights is None else chosen * weights[:, j, None].to(exact)
    return total.to(rows.dtype)


class Unit(NamedTuple):
    """Parameters of the gated unit.

    Args:
        activation: as in `ops.glu.glu`.
        interleaved: gate and up alternate in c; otherwise gate comes first.
        limit, alpha, offset: as in the module's formulas; alpha is 1 unless the activation is silu.
    """

    activation: Activation
    interleaved: bool = False
    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether `ops.glu` computes this unit."""
        return (self.limit, self.alpha, self.offset) == (math.inf, 1.0, 0.0)

    def halves(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up [S, I], views of c."""
        if self.interleaved:
            return c[:, 0::2], c[:, 1::2]
        gate, up = c.chunk(2, dim=1)
        return gate, up


def check_unit(c: Tensor, unit: Unit) -> None:
    """Raise a ModelError for arguments that kernels do not support."""
    if c.dim() != 2 or c.shape[1] % 2 or not c.is_contiguous():
        raise ModelError(f"experts: gate and up are {list(c.shape)}", "pass contiguous rows of both")
    if unit.activation not in ACTIVATIONS:
        raise ModelError(f"experts: activation is {unit.activation!r}", f"use one of {', '.join(ACTIVATIONS)}")


def _activated(c: Tensor, unit: Unit) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """gate, up, a(g), a′(g) and u + offset, in fp32 (fp64 for fp64)."""
    gate, up = (half.to(torch.promote_types(c.dtype, torch.float32)) for half in unit.halves(c))
    if unit.plain:
        return gate, up, *activation_and_derivative(gate, unit.activation), up
    activated, derivative = activation_and_derivative(gate.clamp(max=unit.limit) * unit.alpha, unit.activation)
    return gate, up, activated / unit.alpha, derivative, up.clamp(-unit.limit, unit.limit) + unit.offset


@op("triton.experts", "native.glu")
def expert_unit(c: Tensor, unit: Unit) -> Tensor:
    """h [S, I] from c [S, 2I], in c's dtype."""
    check_unit(c, unit)
    if unit.plain:
        return glu(*unit.halves(c), unit.activation)
    _, _, activated, _, up = _activated(c, unit)
    return (activated * up).to(c.dtype)


@op("triton.experts", "native.glu")
def expert_unit_backward_(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> Tensor:
    """Compute the module's gradients in place: c becomes its gradient, z becomes h.

    Args:
        z: [S, I] sorted rows, in the dtype of c.
        c: [S, 2I], the forward's input.
        weights: fp32 [S], the routing weight of each slot.
        order: int32 [S], the slot of each row.

    Returns:
        fp32 [S]: ∂L/∂w of each slot.
    """
    check_unit(c, unit)
    gate, up, activated, derivative, shifted = _activated(c, unit)
    exact, hidden = z.to(gate.dtype), activated * shifted
    dh = exact * weights[order].to(gate.dtype)[:, None]
    d_gate, d_up = dh * shifted * derivative, dh * activated
    if not unit.plain:
        d_gate, d_up = d_gate * (gate <= unit.limit), d_up * (up.abs() <= unit.limit)
    for half, gradient in zip(unit.halves(c), (d_gate, d_up), strict=True):
        half.copy_(gradient)
    rounded = hidden.to(z.dtype)
    products = (exact * rounded).sum(1).to(weights.dtype)
    z.copy_(rounded)
    return torch.empty_like(weights).index_copy_(0, order.long(), products)


@op("triton.experts")
def top_experts(
    x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The k experts with the largest p = softmax(x·Wᵀ), computed in fp32, largest first.

    Args:
        x: [T, K] float.
        weight: [E, K] in x's dtype.
        normalized: divide a token's weights by their sum.
        dtype: of the weights.

    Returns:
        Logits [T, E] in x's dtype, weights `dtype` [T, k], and indices int64 [T, k]. Ties are broken arbitrarily.
    """
    logits = F.linear(x, weight)
    scores, index = torch.topk(logits.float().softmax(-1), top_k)
    if normalized:
        scores /= scores.sum(-1, keepdim=True)
    return logits, scores.to(dtype), index


@op("cuda.experts4", "triton.few_rows")
def expert_rows(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor
) -> Tensor:
    """Σ_j w_tj·unit(x_t·W₁ᵀ)·W₂ᵀ over the experts of each token t.

    Args:
        x: [T, K] float.
        first: E experts [2I, K], gate and up projections.
        second: E experts [H, I], down projections.
        index: integers [T, k] below E, the experts of each token.
        routed: float [T, k], the weights w.

    Returns:
        [T, H] in x's dtype.
    """
    routing = route(index, first.shape[0])
    hidden = expert_unit(grouped_product(x, first, routing, True), unit)
    return combine(grouped_product(hidden, second, routing), routing, routed)
