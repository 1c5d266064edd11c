"""CPUs: grouped GEMMs of experts with a few rows each, by the formats' own linears on packed weights (`native.decode4`
and others). Only codes of experts with rows are read, and nothing is dequantized into memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...formats.linear import add_term
from ...ops.experts import LowRank, Routing, StackedWeight, check_product, grouped_product, multiplies_codes

ROWS = 4  # average rows per expert; with more, dequantizing is cheaper


def obstacle(
    x: Tensor, stack: StackedWeight, routing: Routing, gather: bool = False, transposed: bool = False,
    low_rank: LowRank | None = None, bias: Tensor | None = None, alpha: float = 1.0,
) -> str | None:  # fmt: skip
    if stack.format is None or transposed or alpha != 1.0:
        return "multiplies by Wᵀ of packed weights alone"
    fits = routing.order.numel() <= ROWS * stack.shape[0]
    return None if fits else f"takes up to {ROWS} rows an expert, on average"


@multiplies_codes.kernel("cpu")
def one_at_a_time(x: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> bool:
    """Return True: a dequantized expert stays in the cache until its GEMM, a dequantized stack does not. Eight experts
    of 6 MB take 2.4 ms to dequantize one at a time, and 23 together."""
    return True


@grouped_product.kernel("cpu", unless=obstacle)
def product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    transposed: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    slots, width = check_product(x, stack, routing, gather, transposed, low_rank, bias)
    out, tokens = torch.empty(slots, width, dtype=x.dtype), routing.tokens if gather else None
    format_, matrix = stack.format, stack.shape[1:]
    assert format_ is not None
    for expert, rows in routing.groups():
        tokens_in = x[rows] if tokens is None else x[tokens[rows]]
        expert_format, tensors = format_.expert(stack.parts, stack.shape, expert)
        expert_bias = None if bias is None else bias[expert]
        term = None if low_rank is None else (low_rank.u[rows] * low_rank.scale, low_rank.factor[expert])
        out[rows] = add_term(expert_format.linear(tokens_in, tensors, matrix, expert_bias), term)
    return out
