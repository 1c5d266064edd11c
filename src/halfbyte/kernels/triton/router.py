"""Triton: a router for the few tokens of a generation's step, in two launches for some eight.

A program of the first has one logit: so all of the router's weights are on their way at once. One of the second has a
token, and one warp, which needs no barriers for its maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.router import top_experts as reference
from ..tiling import power_of_2
from .launch import Launcher

TOKENS, EXPERTS = 8, 512  # at most
BLOCK = 4096  # of K at a time


@triton.jit
def _logits(x_ptr, weight_ptr, out_ptr, experts, columns, BLOCK: tl.constexpr):
    token = tl.program_id(0) // experts
    expert = tl.program_id(0) % experts
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * columns + col, mask=col < columns, other=0.0).to(tl.float32)
        total += x * tl.load(weight_ptr + expert * columns + col, mask=col < columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * experts + expert, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@triton.jit
def _choose(
    logits_ptr, score_ptr, index_ptr, experts,
    TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * experts + e, mask=e < experts, other=-float("inf")).to(tl.float32)
    p = tl.exp(logits - tl.max(logits, axis=0))
    p = p / tl.sum(p, axis=0)
    # One after the other by a number that is larger for a larger p and, of equal ones, for the smaller expert.
    bits = p.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a NaN's sign would make it smaller than what is not there
    key = tl.where(e < experts, (bits.to(tl.int64) << 32) | (EXPERTS - 1 - e), -1)
    j = tl.arange(0, CHOSEN)
    scores = tl.zeros((CHOSEN,), tl.float32)
    index = tl.zeros((CHOSEN,), tl.int64)
    for at in tl.static_range(TOP_K):
        best = tl.max(key, axis=0)
        key = tl.where(key == best, -1, key)
        scores = tl.where(j == at, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), scores)
        index = tl.where(j == at, EXPERTS - 1 - (best & 0xFFFFFFFF), index)
    if NORMALIZED:
        scores = scores / tl.sum(scores, axis=0)
    tl.store(score_ptr + token * TOP_K + j, scores.to(score_ptr.dtype.element_ty), mask=j < TOP_K)
    tl.store(index_ptr + token * TOP_K + j, index, mask=j < TOP_K)


_logits_launcher, _choose_launcher = Launcher(_logits), Launcher(_choose)


def obstacle(x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype) -> str | None:
    if not 0 < x.shape[0] <= TOKENS or weight.shape[0] > EXPERTS:
        return f"takes up to {TOKENS} tokens and {EXPERTS} experts"
    return None if weight.dtype is x.dtype else "takes weights in x's dtype"


@reference.kernel("cuda", "xpu", unless=obstacle)
def top_experts(
    x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, tokens, (experts, columns) = x.contiguous(), weight.contiguous(), x.shape[0], weight.shape
    logits = torch.empty(tokens, experts, dtype=x.dtype, device=x.device)
    scores = torch.empty(tokens, top_k, dtype=dtype, device=x.device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=x.device)
    block = min(BLOCK, max(power_of_2(columns), 32))
    _logits_launcher(tokens * experts, (x, weight, logits), (experts, columns), (block,), warps=4)
    _choose_launcher(
        tokens, (logits, scores, index), (experts,),
        (top_k, normalized, max(power_of_2(experts), 32), max(power_of_2(top_k), 2)), warps=1,
    )  # fmt: skip
    return logits, scores, index
