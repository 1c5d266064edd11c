"""Triton: a router for the few tokens of a generation's step, in two launches for some eight.

A program of the first has one logit: so all of the router's weights are on their way at once. One of the second has a
token: an expert's rank is how many come before it, and equal ones are in the order of their numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.router import top_experts as reference
from ..tiling import power_of_2
from .launch import Launcher

TOKENS, EXPERTS = 8, 256  # at most: more comparisons of experts with each other would spill
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
    logits_ptr, score_ptr, index_ptr, experts, TOP_K: tl.constexpr, NORMALIZED: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + token * experts + e, mask=e < experts, other=-float("inf")).to(tl.float32)
    p = tl.exp(logits - tl.max(logits, axis=0))
    p = p / tl.sum(p, axis=0)
    before = (p[None, :] > p[:, None]) | ((p[None, :] == p[:, None]) & (e[None, :] < e[:, None]))
    rank = tl.sum((before & (e < experts)[None, :]).to(tl.int32), axis=1)
    chosen = (rank < TOP_K) & (e < experts)
    if NORMALIZED:
        p = p / tl.sum(tl.where(chosen, p, 0.0), axis=0)
    tl.store(score_ptr + token * TOP_K + rank, p.to(score_ptr.dtype.element_ty), mask=chosen)
    tl.store(index_ptr + token * TOP_K + rank, e.to(tl.int64), mask=chosen)


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
        tokens, (logits, scores, index), (experts,), (top_k, normalized, max(power_of_2(experts), 32)), warps=8
    )
    return logits, scores, index
