"""Triton: sampling of a token per row with its log-probability: one pass over blocks of logits, then over blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.sample import draw_tokens
from ..tiling import power_of_2
from .launch import Launcher

BLOCK = 4096  # tokens per program


@triton.jit
def _exponential(words):
    """Exponential numbers from random words, as in `ops.sample.exponentials`."""
    v = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))  # where 1 - v would lose precision
    return tl.where(v < 0.015625, series, -tl.log(1.0 - v))


@triton.jit
def _blocks(
    logits_ptr, positions_ptr, seed_ptr, allowed_ptr, top_ptr, total_ptr, best_ptr, token_ptr, vocabulary, temperature,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, DRAWN: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, begin = program // BLOCKS, (program % BLOCKS).to(tl.int32) * BLOCK
    token = begin + tl.arange(0, BLOCK)
    inside = token < vocabulary
    at = row * vocabulary + token
    scores = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32) / temperature
    top = tl.max(scores, axis=0)
    total = tl.sum(tl.exp(scores - tl.where(top == -float("inf"), 0.0, top)), axis=0)
    candidates = scores
    if DRAWN:
        prompt, generation = (
            tl.load(positions_ptr + 3 * row).to(tl.int32),
            tl.load(positions_ptr + 3 * row + 1).to(tl.int32),
        )
        position = tl.load(positions_ptr + 3 * row + 2).to(tl.int32)
        quarter = begin // 4 + tl.arange(0, BLOCK // 4)
        w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), quarter, position, generation, prompt)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        candidates = scores - tl.log(_exponential(words))
    if KEPT:
        inside = inside & (tl.load(allowed_ptr + at, mask=inside, other=0) != 0)
    candidates = tl.where(inside, candidates, -float("inf"))
    tl.store(top_ptr + program, top)
    tl.store(total_ptr + program, total)
    tl.store(best_ptr + program, tl.max(candidates, axis=0))
    tl.store(token_ptr + program, begin + tl.argmax(candidates, axis=0))


@triton.jit
def _rows(
    logits_ptr, top_ptr, total_ptr, best_ptr, token_ptr, tokens_ptr, log_probs_ptr, vocabulary, temperature,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    at, valid = row * BLOCKS + b, b < BLOCKS
    tops = tl.load(top_ptr + at, mask=valid, other=-float("inf"))
    top = tl.max(tops, axis=0)
    total = tl.sum(tl.load(total_ptr + at, mask=valid, other=0.0) * tl.exp(tops - top), axis=0)
    best = tl.load(best_ptr + at, mask=valid, other=-float("inf"))
    token = tl.load(token_ptr + row * BLOCKS + tl.argmax(best, axis=0))
    score = tl.load(logits_ptr + row * vocabulary + token).to(tl.float32) / temperature
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_probs_ptr + row, score - top - tl.log(total))


_by_block, _by_row = Launcher(_blocks), Launcher(_rows)


@draw_tokens.kernel("cuda", "xpu")
def draw(
    logits: Tensor, positions: Tensor, seed: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    logits, positions = logits.contiguous(), positions.contiguous()
    mask = logits if allowed is None else allowed.contiguous().view(torch.uint8)
    blocks = -(-vocabulary // BLOCK)
    tops, totals, bests = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(3))
    best_tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    by = temperature or 1.0
    sums = tops, totals, bests, best_tokens
    constants = blocks, BLOCK, temperature > 0, allowed is not None
    _by_block(rows * blocks, (logits, positions, seed, mask, *sums), (vocabulary, by), constants, warps=8)
    results = tokens, log_probs
    _by_row(rows, (logits, *sums, *results), (vocabulary, by), (blocks, power_of_2(blocks)), warps=4)
    return results
