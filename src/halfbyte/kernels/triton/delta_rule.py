"""Triton: the gated delta rule in chunks, forward and backward.

Programs that walk over a sequence make only the states between chunks and their gradients, for some columns of one
head. All else is computed for all chunks in parallel: 4 launches forward, 7 backward.

Factors of tokens (norms, decays, β) multiply rows of fp32 operands, so the 16-bit q, k, v and out's gradient enter
matmuls exactly. Products k·k and q·k are exact; all other matmuls have at least one fp32 operand and run in TF32 on
NVIDIA's GPUs, in fp32 on AMD's. All sums and intermediate tensors are fp32, 4.1 KB a token and value head with heads
of 128. fp32 inputs would need three TF32 products each, which compile for minutes and spill 1.5 KB a thread.

A program adds up the value heads of a key head in one order, so the bytes of gradients repeat.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import delta_rule as reference
from ...ops.delta_rule import CHUNK, EPSILON, LEAST, Rows, backward_in_parts, forward_in_parts
from ..device import device_of
from ..operands import by_token
from ..tiling import ceil_div, power_of_2
from .launch import Launcher

WIDEST = 256  # largest Dk and Dv
BLOCK = 64  # largest part of Dk or Dv per step of a loop
STAGES = 2  # of the loops over chunks, where a block has PIPELINED_BYTES of shared memory
PIPELINED_BYTES = 160 * 1024
COLUMNS = 32  # values of a state per program of the walks, and per step where Dk is not divided
# Tokens times value heads that are computed at once: they need less memory than the specification plans for.
AT_ONCE = 1 << 18
# Rows of the factors of a chunk's tokens, as `_factors` writes them.
SUM, START, END, BETA, KEY_RSTD, QUERY_RSTD, DOCUMENT = map(tl.constexpr, range(7))
FACTORS = 7


@triton.jit
def _tile(pointer, index, inside, stride, offset, columns, size):
    """Load [CHUNK, columns] values of tokens, zeros outside."""
    at = index.to(tl.int64)[:, None] * stride + offset + columns[None, :]
    return tl.load(pointer + at, mask=inside[:, None] & (columns < size)[None, :], other=0.0)


@triton.jit
def _at(row, column, width):
    """Offsets of a tile of a contiguous matrix."""
    return row[:, None] * width + column[None, :]


@triton.jit
def _program(tokens, heads, CHUNK: tl.constexpr):
    """Row, head and chunk of a program, and indices of the chunk's tokens: in the chunk, over all rows, and if real."""
    chunks = tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head = program % heads
    chunk = program // heads % chunks
    row = program // heads // chunks
    i = tl.arange(0, CHUNK)
    t = chunk * CHUNK + i
    return row, head, chunk, i, row * tokens + t, t < tokens


@triton.jit
def _factor(factors_ptr, tile, i, FACTOR: tl.constexpr, CHUNK: tl.constexpr):
    """Load a factor [CHUNK] of a chunk's tokens."""
    return tl.load(factors_ptr + (tile.to(tl.int64) * 7 + FACTOR) * CHUNK + i)


@triton.jit
def _pairs(factors_ptr, tile, i, CHUNK: tl.constexpr):
    """Whether token i reads token j, and e^(G_i − G_j), 0 where it does not."""
    document = _factor(factors_ptr, tile, i, DOCUMENT, CHUNK)
    sums = _factor(factors_ptr, tile, i, SUM, CHUNK)
    visible = (document[:, None] == document[None, :]) & (i[None, :] <= i[:, None])
    return visible, tl.where(visible, tl.exp(sums[:, None] - sums[None, :]), 0.0)


@triton.jit
def _pairs_transposed(factors_ptr, tile, i, CHUNK: tl.constexpr):
    """e^(G_j − G_i), 0 where token j does not read token i."""
    document = _factor(factors_ptr, tile, i, DOCUMENT, CHUNK)
    sums = _factor(factors_ptr, tile, i, SUM, CHUNK)
    visible = (document[:, None] == document[None, :]) & (i[:, None] <= i[None, :])
    return tl.where(visible, tl.exp(sums[None, :] - sums[:, None]), 0.0)


@triton.jit
def _factors(
    query_ptr, key_ptr, decay_ptr, beta_ptr, first_ptr, factors_ptr,
    rows, tokens, key_heads, heads, key_size, query_stride, key_stride, scale, eps,
    FIRST: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, head, chunk, i, index, inside = _program(tokens, heads, CHUNK)
    first = tl.zeros((CHUNK,), tl.int32)
    if FIRST:
        first = tl.load(first_ptr + index, mask=inside, other=0).to(tl.int32)
    before = i[None, :] <= i[:, None]
    document = tl.sum(tl.where(before, first[None, :], 0), axis=1)
    document_of_column = tl.sum(tl.where(i[:, None] <= i[None, :], first[:, None], 0), axis=0)
    decay = tl.load(decay_ptr + index.to(tl.int64) * heads + head, mask=inside, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + index.to(tl.int64) * heads + head, mask=inside, other=0.0).to(tl.float32)
    # Terms of other documents are added as exact zeros, so a document's bits do not depend on them.
    visible = before & (document[:, None] == document_of_column[None, :])
    sums = tl.sum(tl.where(visible, decay[None, :], 0.0), axis=1)
    is_last = i == CHUNK - 1
    sum_of_last = tl.sum(tl.where(is_last, sums, 0.0), axis=0)
    document_of_last = tl.sum(first, axis=0)
    d = tl.arange(0, KEYS)
    offset = head // (heads // key_heads) * key_size
    query = _tile(query_ptr, index, inside, query_stride, offset, d, key_size).to(tl.float32)
    key = _tile(key_ptr, index, inside, key_stride, offset, d, key_size).to(tl.float32)
    tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    at = factors_ptr + tile * 7 * CHUNK + i
    tl.store(at + SUM * CHUNK, sums)
    tl.store(at + START * CHUNK, tl.where(document == 0, tl.exp(sums), 0.0))
    tl.store(at + END * CHUNK, tl.where(document == document_of_last, tl.exp(sum_of_last - sums), 0.0))
    tl.store(at + BETA * CHUNK, beta)
    tl.store(at + KEY_RSTD * CHUNK, tl.rsqrt(tl.sum(key * key, axis=1) + eps))
    tl.store(at + QUERY_RSTD * CHUNK, tl.rsqrt(tl.sum(query * query, axis=1) + eps) * scale)
    tl.store(at + DOCUMENT * CHUNK, document.to(tl.float32))


@triton.jit
def _products(
    left_ptr, left_stride, right_ptr, right_stride, index, inside, offset, size,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dot products [CHUNK, CHUNK] of two rows of inputs, not normalised."""
    total = tl.zeros((CHUNK, CHUNK), tl.float32)
    for block in range(0, SIZE, BLOCK):
        d = block + tl.arange(0, BLOCK)
        left = _tile(left_ptr, index, inside, left_stride, offset, d, size)
        right = _tile(right_ptr, index, inside, right_stride, offset, d, size)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    return total


@triton.jit
def _inverse(lower, PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr):
    """(I + A)⁻¹ for strictly lower triangular A; `ops.delta_rule.inverse` with blocks as masks."""
    i = tl.arange(0, CHUNK)
    row, column = i[:, None], i[None, :]
    block = tl.where(row // LEAST == column // LEAST, lower, 0.0)
    square = tl.dot(block, block, input_precision=PRECISION)
    fourth = tl.dot(square, square, input_precision=PRECISION)
    inverse = tl.where(row == column, 1.0, 0.0) - block + square
    inverse -= tl.dot(block, square, input_precision=PRECISION)
    inverse = tl.dot(inverse, fourth, inverse, input_precision=PRECISION)
    width = LEAST
    for _ in range(3):  # a loop, since unrolled the kernel compiles for minutes
        of_pair = (row // (2 * width) == column // (2 * width)) & (row // width != column // width)
        below = tl.dot(tl.where(of_pair, lower, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, below, input_precision=PRECISION)
        width *= 2
    return inverse


@triton.jit
def _prepare(
    query_ptr, key_ptr, value_ptr, grad_ptr, factors_ptr, inverse_ptr, weight_ptr, change_ptr, direct_ptr,
    tokens, key_heads, heads, key_size, value_size, query_stride, key_stride, value_stride, grad_stride,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """W and U of a chunk and head; BACKWARD: also T, and Pᵀ·grad, what a chunk's own outputs add to Δ's gradient."""
    row, head, chunk, i, index, inside = _program(tokens, heads, CHUNK)
    key_offset = head // (heads // key_heads) * key_size
    tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    _visible, pairs = _pairs(factors_ptr, tile, i, CHUNK)
    beta = _factor(factors_ptr, tile, i, BETA, CHUNK)
    key_rstd = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK)
    pairs *= key_rstd[None, :]
    if BACKWARD:
        # Pᵀ is computed as such: Triton 3.4 to 3.7.0 miscompile dots of a dot's transposed result on Hopper.
        scores = _products(key_ptr, key_stride, query_ptr, query_stride, index, inside, key_offset, key_size,
                           PRECISION, CHUNK, KEYS, KEY_BLOCK)  # fmt: skip
        scores *= _pairs_transposed(factors_ptr, tile, i, CHUNK)
        scores *= key_rstd[:, None] * _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK)[None, :]
        for block in range(0, VALUES, VALUE_BLOCK):
            v = block + tl.arange(0, VALUE_BLOCK)
            grad = _tile(grad_ptr, index, inside, grad_stride, head * value_size, v, value_size).to(tl.float32)
            direct = tl.dot(scores, grad, input_precision=PRECISION)
            tl.store(direct_ptr + tile * CHUNK * VALUES + _at(i, v, VALUES), direct)
    lower = _products(key_ptr, key_stride, key_ptr, key_stride, index, inside, key_offset, key_size,
                      PRECISION, CHUNK, KEYS, KEY_BLOCK)  # fmt: skip
    lower *= tl.where(i[None, :] < i[:, None], pairs * (beta * key_rstd)[:, None], 0.0)
    inverse = _inverse(lower, PRECISION, CHUNK, LEAST)
    if BACKWARD:
        tl.store(inverse_ptr + tile * CHUNK * CHUNK + _at(i, i, CHUNK), inverse)
    inverse *= beta[None, :]
    for block in range(0, VALUES, VALUE_BLOCK):
        v = block + tl.arange(0, VALUE_BLOCK)
        value = _tile(value_ptr, index, inside, value_stride, head * value_size, v, value_size).to(tl.float32)
        change = tl.dot(inverse, value, input_precision=PRECISION)
        tl.store(change_ptr + tile * CHUNK * VALUES + _at(i, v, VALUES), change)
    inverse *= (key_rstd * _factor(factors_ptr, tile, i, START, CHUNK))[None, :]
    for block in range(0, KEYS, KEY_BLOCK):
        d = block + tl.arange(0, KEY_BLOCK)
        key = _tile(key_ptr, index, inside, key_stride, key_offset, d, key_size).to(tl.float32)
        weight = tl.dot(inverse, key, input_precision=PRECISION)
        tl.store(weight_ptr + tile * CHUNK * KEYS + _at(i, d, KEYS), weight)


@triton.jit
def _states(
    key_ptr, factors_ptr, weight_ptr, change_ptr, states_ptr, final_ptr,
    tokens, key_heads, heads, key_size, value_size, key_stride,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """States before each chunk and after the last one, and Δ in the place of U."""
    blocks, chunks = VALUES // COLUMNS, tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, row = program // blocks % heads, program // blocks // heads
    key_offset = head // (heads // key_heads) * key_size
    i, d, v = tl.arange(0, CHUNK), tl.arange(0, KEYS), program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.zeros((KEYS, COLUMNS), tl.float32)
    for chunk in tl.range(chunks, num_stages=STAGES):
        tile = ((row * heads + head) * chunks + chunk).to(tl.int64)
        tl.store(states_ptr + tile * KEYS * VALUES + _at(d, v, VALUES), state)
        change_at = change_ptr + tile * CHUNK * VALUES + _at(i, v, VALUES)
        weight = tl.load(weight_ptr + tile * CHUNK * KEYS + _at(i, d, KEYS))
        change = tl.load(change_at) - tl.dot(weight, state, input_precision=PRECISION)
        tl.store(change_at, change)
        t = chunk * CHUNK + i
        key = _tile(key_ptr, row * tokens + t, t < tokens, key_stride, key_offset, d, key_size).to(tl.float32)
        end = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK) * _factor(factors_ptr, tile, i, END, CHUNK)
        through = _factor(factors_ptr, tile, CHUNK - 1, START, CHUNK)
        state = tl.dot(tl.trans(key), change * end[:, None], state * through, input_precision=PRECISION)
    at = (row * heads + head).to(tl.int64) * key_size * value_size + _at(d, v, value_size)
    tl.store(final_ptr + at, state, mask=(d < key_size)[:, None] & (v < value_size)[None, :])


@triton.jit
def _outputs(
    query_ptr, key_ptr, factors_ptr, change_ptr, states_ptr, out_ptr,
    tokens, key_heads, heads, key_size, value_size, query_stride, key_stride,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, chunk, i, index, inside = _program(tokens, heads, CHUNK)
    key_offset = head // (heads // key_heads) * key_size
    tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    _visible, pairs = _pairs(factors_ptr, tile, i, CHUNK)
    query_rstd = _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK)
    start = query_rstd * _factor(factors_ptr, tile, i, START, CHUNK)
    scores = _products(query_ptr, query_stride, key_ptr, key_stride, index, inside, key_offset, key_size,
                       PRECISION, CHUNK, KEYS, KEY_BLOCK)  # fmt: skip
    scores *= pairs * query_rstd[:, None] * _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK)[None, :]
    for v_block in range(0, VALUES, VALUE_BLOCK):
        v = v_block + tl.arange(0, VALUE_BLOCK)
        out = tl.zeros((CHUNK, VALUE_BLOCK), tl.float32)
        for block in range(0, KEYS, KEY_BLOCK):
            d = block + tl.arange(0, KEY_BLOCK)
            query = _tile(query_ptr, index, inside, query_stride, key_offset, d, key_size).to(tl.float32)
            state = tl.load(states_ptr + tile * KEYS * VALUES + _at(d, v, VALUES))
            out = tl.dot(query, state, out, input_precision=PRECISION)
        change = tl.load(change_ptr + tile * CHUNK * VALUES + _at(i, v, VALUES))
        out = tl.dot(scores, change, out * start[:, None], input_precision=PRECISION)
        at = _at(index.to(tl.int64) * heads + head, v, value_size)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (v < value_size)[None, :])


@triton.jit
def _state_gradients(
    query_ptr, key_ptr, grad_ptr, factors_ptr, weight_ptr, direct_ptr, after_ptr,
    tokens, key_heads, heads, key_size, value_size, query_stride, key_stride, grad_stride,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of the states after each chunk, and of Δ in the place of its direct part."""
    blocks, chunks = VALUES // COLUMNS, tl.cdiv(tokens, CHUNK)
    program = tl.program_id(0)
    head, row = program // blocks % heads, program // blocks // heads
    key_offset = head // (heads // key_heads) * key_size
    i, d, v = tl.arange(0, CHUNK), tl.arange(0, KEYS), program % blocks * COLUMNS + tl.arange(0, COLUMNS)
    after = tl.zeros((KEYS, COLUMNS), tl.float32)
    for turn in tl.range(chunks, num_stages=STAGES):
        chunk = chunks - 1 - turn
        tile = ((row * heads + head) * chunks + chunk).to(tl.int64)
        tl.store(after_ptr + tile * KEYS * VALUES + _at(d, v, VALUES), after)
        t = chunk * CHUNK + i
        index, inside = row * tokens + t, t < tokens
        key = _tile(key_ptr, index, inside, key_stride, key_offset, d, key_size).to(tl.float32)
        end = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK) * _factor(factors_ptr, tile, i, END, CHUNK)
        change_at = direct_ptr + tile * CHUNK * VALUES + _at(i, v, VALUES)
        grad_change = tl.load(change_at) + tl.dot(key, after, input_precision=PRECISION) * end[:, None]
        tl.store(change_at, grad_change)
        start = _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK) * _factor(factors_ptr, tile, i, START, CHUNK)
        grad = _tile(grad_ptr, index, inside, grad_stride, head * value_size, v, value_size).to(tl.float32)
        query = _tile(query_ptr, index, inside, query_stride, key_offset, d, key_size).to(tl.float32)
        after *= _factor(factors_ptr, tile, CHUNK - 1, START, CHUNK)
        after = tl.dot(tl.trans(query), grad * start[:, None], after, input_precision=PRECISION)
        weight = tl.load(weight_ptr + tile * CHUNK * KEYS + _at(i, d, KEYS))
        after -= tl.dot(tl.trans(weight), grad_change, input_precision=PRECISION)


@triton.jit
def _pair_gradients(
    query_ptr, key_ptr, value_ptr, grad_ptr, factors_ptr, inverse_ptr, change_ptr, grad_change_ptr,
    grad_value_ptr, grad_scores_ptr, grad_sums_ptr, grad_beta_ptr,
    tokens, key_heads, heads, key_size, value_size, query_stride, key_stride, value_stride, grad_stride,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of v, of q·k (`grad_scores`) and of k·k (in T's place, plus its transpose), and parts of G's and β's.

    R = β·V − (β·e^G·K)·S = (I + A)·Δ has the gradient Tᵀ·dΔ, which is stored in dΔ's place, and A has −dR·Δᵀ.
    """
    row, head, chunk, i, index, inside = _program(tokens, heads, CHUNK)
    key_offset = head // (heads // key_heads) * key_size
    tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    beta = _factor(factors_ptr, tile, i, BETA, CHUNK)
    matrix_at = tile * CHUNK * CHUNK + _at(i, i, CHUNK)
    transposed = tl.load(inverse_ptr + tile * CHUNK * CHUNK + i[:, None] + i[None, :] * CHUNK)
    grad_p = tl.zeros((CHUNK, CHUNK), tl.float32)
    grad_a = tl.zeros((CHUNK, CHUNK), tl.float32)
    grad_beta = tl.zeros((CHUNK,), tl.float32)
    for block in range(0, VALUES, VALUE_BLOCK):
        v = block + tl.arange(0, VALUE_BLOCK)
        value_at = tile * CHUNK * VALUES + _at(i, v, VALUES)
        grad_r = tl.dot(transposed, tl.load(grad_change_ptr + value_at), input_precision=PRECISION)
        change = tl.trans(tl.load(change_ptr + value_at))
        grad_a = tl.dot(grad_r, change, grad_a, input_precision=PRECISION)
        grad = _tile(grad_ptr, index, inside, grad_stride, head * value_size, v, value_size).to(tl.float32)
        grad_p = tl.dot(grad, change, grad_p, input_precision=PRECISION)
        value = _tile(value_ptr, index, inside, value_stride, head * value_size, v, value_size).to(tl.float32)
        grad_beta += tl.sum(grad_r * value, axis=1)
        at = _at(index.to(tl.int64) * heads + head, v, value_size)
        grad_value = (grad_r * beta[:, None]).to(grad_value_ptr.dtype.element_ty)
        tl.store(grad_value_ptr + at, grad_value, mask=inside[:, None] & (v < value_size)[None, :])
        tl.store(grad_change_ptr + value_at, grad_r)
    _visible, pairs = _pairs(factors_ptr, tile, i, CHUNK)
    key_rstd = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK)
    query_rstd = _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK)
    grad_p *= pairs
    tl.store(grad_scores_ptr + matrix_at, grad_p)
    scores = _products(query_ptr, query_stride, key_ptr, key_stride, index, inside, key_offset, key_size,
                       PRECISION, CHUNK, KEYS, KEY_BLOCK)  # fmt: skip
    weights = grad_p * scores * query_rstd[:, None] * key_rstd[None, :]
    grad_a = tl.where(i[None, :] < i[:, None], -grad_a * pairs, 0.0)
    products = _products(key_ptr, key_stride, key_ptr, key_stride, index, inside, key_offset, key_size,
                         PRECISION, CHUNK, KEYS, KEY_BLOCK)  # fmt: skip
    products *= grad_a * key_rstd[:, None] * key_rstd[None, :]
    grad_beta += tl.sum(products, axis=1)
    weights += products * beta[:, None]
    grad_a *= beta[:, None]
    tl.store(inverse_ptr + matrix_at, grad_a + tl.trans(grad_a))
    tl.store(grad_sums_ptr + tile * CHUNK + i, tl.sum(weights, axis=1) - tl.sum(weights, axis=0))
    tl.store(grad_beta_ptr + tile * CHUNK + i, grad_beta)


@triton.jit
def _unit_gradient(grad, unit, rstd):
    """Gradient of x [CHUNK, KEYS] from the gradient of unit = x·rstd."""
    return (grad - unit * tl.sum(grad * unit, axis=1)[:, None]) * rstd[:, None]


@triton.jit
def _query_gradients(
    query_ptr, key_ptr, grad_ptr, factors_ptr, states_ptr, grad_scores_ptr, grad_starts_ptr, grad_query_ptr,
    tokens, key_heads, heads, key_size, value_size, query_stride, key_stride, grad_stride, scale,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient of q of a chunk and key head, and its part of G's gradients."""
    row, key_head, chunk, i, index, inside = _program(tokens, key_heads, CHUNK)
    d, in_group = tl.arange(0, KEYS), heads // key_heads
    tile = ((row * heads + key_head * in_group) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    key_rstd = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK)
    query_rstd = _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK)
    query = _tile(query_ptr, index, inside, query_stride, key_head * key_size, d, key_size).to(tl.float32)
    query *= query_rstd[:, None]
    grad_query = tl.zeros((CHUNK, KEYS), tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for head in range(key_head * in_group, (key_head + 1) * in_group):
        tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
        of_state = tl.zeros((CHUNK, KEYS), tl.float32)
        for block in range(0, VALUES, COLUMNS):
            v = block + tl.arange(0, COLUMNS)
            grad = _tile(grad_ptr, index, inside, grad_stride, head * value_size, v, value_size).to(tl.float32)
            state = tl.load(states_ptr + tile * KEYS * VALUES + _at(d, v, VALUES))
            of_state = tl.dot(grad, tl.trans(state), of_state, input_precision=PRECISION)
        of_state *= _factor(factors_ptr, tile, i, START, CHUNK)[:, None]
        tl.store(grad_starts_ptr + tile * CHUNK + i, tl.sum(of_state * query, axis=1))
        grad_query += of_state
        grad_scores += tl.load(grad_scores_ptr + tile * CHUNK * CHUNK + _at(i, i, CHUNK))
    key = _tile(key_ptr, index, inside, key_stride, key_head * key_size, d, key_size).to(tl.float32)
    grad_query = tl.dot(grad_scores * key_rstd[None, :], key, grad_query, input_precision=PRECISION)
    grad_query = _unit_gradient(grad_query * scale, query / scale, query_rstd / scale)
    at = _at(index.to(tl.int64) * key_heads + key_head, d, key_size)
    grad_query = grad_query.to(grad_query_ptr.dtype.element_ty)
    tl.store(grad_query_ptr + at, grad_query, mask=inside[:, None] & (d < key_size)[None, :])


@triton.jit
def _key_gradients(
    query_ptr, key_ptr, factors_ptr, states_ptr, after_ptr, change_ptr, grad_r_ptr, grad_scores_ptr, grad_products_ptr,
    grad_sums_ptr, grad_starts_ptr, grad_beta_parts_ptr, grad_key_ptr, grad_decay_ptr, grad_beta_ptr,
    tokens, key_heads, heads, key_size, query_stride, key_stride,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of k of a chunk and key head, and of g and β of its value heads."""
    row, key_head, chunk, i, index, inside = _program(tokens, key_heads, CHUNK)
    d, in_group = tl.arange(0, KEYS), heads // key_heads
    tile = ((row * heads + key_head * in_group) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
    key_rstd = _factor(factors_ptr, tile, i, KEY_RSTD, CHUNK)
    query_rstd = _factor(factors_ptr, tile, i, QUERY_RSTD, CHUNK)
    key = _tile(key_ptr, index, inside, key_stride, key_head * key_size, d, key_size).to(tl.float32)
    grad_key = tl.zeros((CHUNK, KEYS), tl.float32)
    grad_scores = tl.zeros((CHUNK, CHUNK), tl.float32)  # transposed
    grad_products = tl.zeros((CHUNK, CHUNK), tl.float32)
    for head in range(key_head * in_group, (key_head + 1) * in_group):
        tile = ((row * heads + head) * tl.cdiv(tokens, CHUNK) + chunk).to(tl.int64)
        of_start = tl.zeros((CHUNK, KEYS), tl.float32)
        of_end = tl.zeros((CHUNK, KEYS), tl.float32)
        overlap = 0.0
        for block in range(0, VALUES, COLUMNS):
            v = block + tl.arange(0, COLUMNS)
            value_at = tile * CHUNK * VALUES + _at(i, v, VALUES)
            state_at = tile * KEYS * VALUES + _at(d, v, VALUES)
            state = tl.load(states_ptr + state_at)
            after = tl.load(after_ptr + state_at)
            overlap += tl.sum(tl.sum(state * after, axis=1), axis=0)
            of_start = tl.dot(tl.load(grad_r_ptr + value_at), tl.trans(state), of_start, input_precision=PRECISION)
            of_end = tl.dot(tl.load(change_ptr + value_at), tl.trans(after), of_end, input_precision=PRECISION)
        start = _factor(factors_ptr, tile, i, START, CHUNK)
        beta = _factor(factors_ptr, tile, i, BETA, CHUNK)
        of_start *= -start[:, None]
        of_end *= _factor(factors_ptr, tile, i, END, CHUNK)[:, None]
        grad_key += of_start * beta[:, None] + of_end
        from_start = tl.sum(of_start * key, axis=1) * key_rstd
        from_end = tl.sum(of_end * key, axis=1) * key_rstd
        through = tl.sum(tl.where(i == CHUNK - 1, start, 0.0), axis=0)
        grad_sums = tl.load(grad_sums_ptr + tile * CHUNK + i) + tl.load(grad_starts_ptr + tile * CHUNK + i)
        grad_sums += beta * from_start - from_end
        # The sum over rows of a matrix: Triton 3.6 does not compile the sum of this vector on Blackwell.
        of_last = tl.sum(tl.zeros((CHUNK, CHUNK), tl.float32) + from_end[:, None], axis=0) + through * overlap
        grad_sums += tl.where(i == CHUNK - 1, of_last, 0.0)
        visible, _ = _pairs(factors_ptr, tile, i, CHUNK)
        grad_decay = tl.sum(tl.where(visible, grad_sums[:, None], 0.0), axis=0)
        grad_beta = tl.load(grad_beta_parts_ptr + tile * CHUNK + i) + from_start
        at = index.to(tl.int64) * heads + head
        tl.store(grad_decay_ptr + at, grad_decay.to(grad_decay_ptr.dtype.element_ty), mask=inside)
        tl.store(grad_beta_ptr + at, grad_beta.to(grad_beta_ptr.dtype.element_ty), mask=inside)
        matrix_at = tile * CHUNK * CHUNK + _at(i, i, CHUNK)
        grad_scores += tl.load(grad_scores_ptr + tile * CHUNK * CHUNK + i[:, None] + i[None, :] * CHUNK)
        grad_products += tl.load(grad_products_ptr + matrix_at)
    grad_key = tl.dot(grad_products * key_rstd[None, :], key, grad_key, input_precision=PRECISION)
    query = _tile(query_ptr, index, inside, query_stride, key_head * key_size, d, key_size).to(tl.float32)
    grad_key = tl.dot(grad_scores * query_rstd[None, :], query, grad_key, input_precision=PRECISION)
    at = _at(index.to(tl.int64) * key_heads + key_head, d, key_size)
    grad_key = _unit_gradient(grad_key, key * key_rstd[:, None], key_rstd).to(grad_key_ptr.dtype.element_ty)
    tl.store(grad_key_ptr + at, grad_key, mask=inside[:, None] & (d < key_size)[None, :])


# Loops of few steps are not pipelined: buffers of later steps would exceed 64 or 99 KiB of shared memory.
_factors_launcher, _prepare_launcher = Launcher(_factors), Launcher(_prepare, num_stages=1)
_states_launcher, _outputs_launcher = Launcher(_states), Launcher(_outputs, num_stages=1)
_state_gradients_launcher, _pair_launcher = Launcher(_state_gradients), Launcher(_pair_gradients, num_stages=1)
_query_launcher, _key_launcher = Launcher(_query_gradients, num_stages=1), Launcher(_key_gradients, num_stages=1)
WARPS = 4
WIDE_WARPS = 8  # of programs with several accumulators [CHUNK, Dk]


class _Call:
    """Operands of one call, strides, sizes and launches that both passes share.

    Attributes:
        factors: [D·Hv·n, FACTORS, CHUNK], as `_factors` writes them.
        weight, change: W, and U, which `states` replaces by Δ, [D·Hv·n, CHUNK, ·], columns padded to powers of two.
    """

    def __init__(self, rows: Rows):
        (self.query, self.query_stride), (self.key, self.key_stride), (self.value, self.value_stride) = (
            by_token(x) for x in rows[:3]
        )
        self.rows = rows
        self.documents, self.tokens, self.key_heads, self.key_size = rows.key.shape
        self.heads, self.value_size = rows.value.shape[2:]
        self.chunks = ceil_div(self.tokens, CHUNK)
        self.tiles = self.documents * self.heads * self.chunks
        self.keys, self.values = (max(power_of_2(size), 16) for size in (self.key_size, self.value_size))
        self.key_block, self.value_block = min(self.keys, BLOCK), min(self.values, BLOCK)
        self.columns = min(self.values, COLUMNS)
        self.precision = _precision(rows.value)
        self.factors = self.tile(FACTORS)
        decay, beta = rows.decay.contiguous(), rows.beta.contiguous()
        first = decay if rows.first is None else rows.first.contiguous().view(torch.uint8)
        _factors_launcher(
            self.tiles, (self.query, self.key, decay, beta, first, self.factors),
            (self.documents, self.tokens, self.key_heads, self.heads, self.key_size, self.query_stride,
             self.key_stride, self.scale, EPSILON),
            (rows.first is not None, CHUNK, self.keys), warps=WARPS,
        )  # fmt: skip
        self.weight, self.change = self.tile(self.keys), self.tile(self.values)

    @property
    def scale(self) -> float:
        return self.key_size**-0.5

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.tokens, self.key_heads, self.heads, self.key_size, self.value_size

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.keys, self.values, self.key_block, self.value_block

    @property
    def wide(self) -> tuple[Any, ...]:
        """Constants of programs that hold all of Dk."""
        return self.precision, CHUNK, self.keys, self.values, self.columns

    @property
    def walk(self) -> tuple[Any, ...]:
        """Constants of programs that walk over a sequence."""
        return *self.wide, _stages(self.value, self.keys)

    @property
    def walkers(self) -> int:
        return self.documents * self.heads * (self.values // self.columns)

    def tile(self, width: int) -> Tensor:
        """An fp32 tensor [D·Hv·n, CHUNK, width]."""
        return torch.empty(self.tiles, CHUNK, width, dtype=torch.float32, device=self.value.device)

    def prepare(self, grad: Tensor | None, grad_stride: int, inverse: Tensor, direct: Tensor) -> None:
        _prepare_launcher(
            self.tiles,
            (self.query, self.key, self.value, self.value if grad is None else grad, self.factors, inverse,
             self.weight, self.change, direct),
            (*self.sizes, self.query_stride, self.key_stride, self.value_stride, grad_stride),
            (grad is not None, self.precision, CHUNK, LEAST, *self.blocks), warps=WARPS,
        )  # fmt: skip

    def states(self) -> tuple[Tensor, Tensor]:
        """States before each chunk [D·Hv·n, Dk, Dv], padded to powers of two, and the final ones [D, Hv, Dk, Dv]."""
        states = torch.empty(self.tiles, self.keys, self.values, dtype=torch.float32, device=self.value.device)
        final = states.new_empty(self.documents, self.heads, self.key_size, self.value_size)
        _states_launcher(
            self.walkers, (self.key, self.factors, self.weight, self.change, states, final),
            (*self.sizes, self.key_stride), self.walk, warps=WARPS,
        )  # fmt: skip
        return states, final


def _precision(x: Tensor) -> str:
    """Triton's `input_precision` of matmuls with fp32 operands, for inputs x."""
    return "ieee" if device_of(x).backend in ("hip", "cpu") else "tf32"


def _stages(x: Tensor, keys: int) -> int:
    """Chunks that a walk loads ahead plus one, as far as shared memory allows."""
    return STAGES if keys <= 128 and device_of(x).shared_bytes >= PIPELINED_BYTES else 1


def _forward(rows: Rows) -> tuple[Tensor, Tensor]:
    call = _Call(rows)
    call.prepare(None, 0, call.change, call.change)
    states, final = call.states()
    out = torch.empty(rows.value.shape, dtype=rows.value.dtype, device=rows.value.device)
    _outputs_launcher(
        call.tiles, (call.query, call.key, call.factors, call.change, states, out),
        (*call.sizes, call.query_stride, call.key_stride),
        (call.precision, CHUNK, *call.blocks), warps=WARPS,
    )  # fmt: skip
    return out, final


def _backward(grad: Tensor, rows: Rows) -> tuple[Tensor, ...]:
    call = _Call(rows)
    grad, grad_stride = by_token(grad)
    inverse, grad_scores, grad_change = call.tile(CHUNK), call.tile(CHUNK), call.tile(call.values)
    call.prepare(grad, grad_stride, inverse, grad_change)
    states, _ = call.states()
    after = torch.empty_like(states)
    _state_gradients_launcher(
        call.walkers, (call.query, call.key, grad, call.factors, call.weight, grad_change, after),
        (*call.sizes, call.query_stride, call.key_stride, grad_stride), call.walk, warps=WARPS,
    )  # fmt: skip
    grad_sums, grad_starts, grad_beta_parts = call.tile(1), call.tile(1), call.tile(1)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in rows[:5])
    grad_query, grad_key, grad_value, grad_decay, grad_beta = grads
    _pair_launcher(
        call.tiles,
        (call.query, call.key, call.value, grad, call.factors, inverse, call.change, grad_change, grad_value,
         grad_scores, grad_sums, grad_beta_parts),
        (*call.sizes, call.query_stride, call.key_stride, call.value_stride, grad_stride),
        (call.precision, CHUNK, *call.blocks), warps=WARPS,
    )  # fmt: skip
    programs = call.documents * call.key_heads * call.chunks
    _query_launcher(
        programs, (call.query, call.key, grad, call.factors, states, grad_scores, grad_starts, grad_query),
        (*call.sizes, call.query_stride, call.key_stride, grad_stride, call.scale), call.wide, warps=WIDE_WARPS,
    )  # fmt: skip
    _key_launcher(
        programs,
        (call.query, call.key, call.factors, states, after, call.change, grad_change, grad_scores, inverse,
         grad_sums, grad_starts, grad_beta_parts, grad_key, grad_decay, grad_beta),
        (*call.sizes[:4], call.query_stride, call.key_stride), call.wide, warps=WIDE_WARPS,
    )  # fmt: skip
    return grads


def obstacle(query: Tensor, key: Tensor, value: Tensor, *_: object) -> str | None:
    """Return why the kernels do not take these q, k and v, or None."""
    if max(key.shape[3], value.shape[3]) > WIDEST:
        return f"takes heads of up to {WIDEST}"
    if not query.dtype is key.dtype is value.dtype or value.element_size() != 2:
        return "takes q, k and v of one 16-bit dtype"
    device = device_of(value)
    return "needs tensor cores for TF32" if device.backend == "cuda" and not device.at_least((8, 0)) else None


def backward_obstacle(grad: Tensor, *rows: Any) -> str | None:
    return obstacle(*rows)


@reference.delta_rule.kernel("cuda", "xpu", unless=obstacle)
def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return forward_in_parts(_forward, Rows(query, key, value, decay, beta, first), AT_ONCE)


@reference.delta_rule_backward.kernel("cuda", "xpu", unless=backward_obstacle)
def delta_rule_backward(grad: Tensor, *rows: Any) -> tuple[Tensor, ...]:
    return backward_in_parts(_backward, grad, Rows(*rows), AT_ONCE)
