"""Triton: low-rank GEMMs of up to three adapters of one input, with their dropout masks computed inside.

Each reads x once for all adapters. `products` splits the columns of x, `gradients` its rows, among programs, whose
partial sums torch adds in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import dropout as reference
from ...ops.dropout import Dropout
from ..device import device_of
from ..operands import bump_versions
from ..tiling import ceil_div, power_of_2
from .dropout import kept, row_keys
from .launch import Launcher
from .lora_glu import AMPERE, load_factor, store_factor

TILES = {2: 64, 4: 32}  # rows and columns of a tile, by bytes of a value
STAGES = 3
STRIPES = (1024, 512, 256)  # columns, or rows, per program: the most with which there are `PROGRAMS` programs
PROGRAMS = 512
MOST_ADAPTERS = 3
MOST_RANKS = 96  # padded, of all adapters: more do not fit into registers


@triton.jit
def _mask(seed_ptr, row, column, threshold):
    first_key, second_key = row_keys(seed_ptr, row)
    return kept(first_key, second_key, column, threshold)


@triton.jit
def _products(
    x_ptr, a_ptr, seed_ptr, partial_ptr,
    rows, columns, x_stride, first_column, threshold, scale,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = R0 + R1 + R2
    stripes = tl.cdiv(columns, STRIPE)
    stripe = tl.program_id(0) % stripes
    row = tl.program_id(0) // stripes * ROWS + tl.arange(0, ROWS)
    threshold = threshold.to(tl.uint32)
    first, second = row_keys(seed_ptr, row)
    u0 = tl.zeros((ROWS, RANK), tl.float32)
    if R1 > 0:
        first1, second1 = row_keys(seed_ptr + 1, row)
        u1 = tl.zeros((ROWS, RANK), tl.float32)
    if R2 > 0:
        first2, second2 = row_keys(seed_ptr + 2, row)
        u2 = tl.zeros((ROWS, RANK), tl.float32)
    x_row = x_ptr + row.to(tl.int64)[:, None] * x_stride
    for step in tl.range(0, STRIPE // COLUMNS, num_stages=STAGES):
        col = stripe * STRIPE + step * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (col < columns)[None, :]
        x = tl.load(x_row + col[None, :], mask=inside, other=0.0)
        masked_col = col + first_column
        a = load_factor(a_ptr, col, columns, 1, R0, columns, RANK)
        u0 = tl.dot(tl.where(kept(first, second, masked_col, threshold), x, 0.0), a, u0, input_precision="ieee")
        if R1 > 0:
            a = load_factor(a_ptr + R0 * columns, col, columns, 1, R1, columns, RANK)
            u1 = tl.dot(tl.where(kept(first1, second1, masked_col, threshold), x, 0.0), a, u1, input_precision="ieee")
        if R2 > 0:
            a = load_factor(a_ptr + (R0 + R1) * columns, col, columns, 1, R2, columns, RANK)
            u2 = tl.dot(tl.where(kept(first2, second2, masked_col, threshold), x, 0.0), a, u2, input_precision="ieee")
    out = partial_ptr + stripe.to(tl.int64) * rows * R
    store_factor(out, u0 * scale, row, rows, R, R0, 1, RANK)
    if R1 > 0:
        store_factor(out + R0, u1 * scale, row, rows, R, R1, 1, RANK)
    if R2 > 0:
        store_factor(out + R0 + R1, u2 * scale, row, rows, R, R2, 1, RANK)


@triton.jit
def _gradients(
    v_ptr, a_ptr, seed_ptr, x_ptr, dx_ptr, sum_ptr,
    rows, columns, x_stride, first_column, threshold, scale,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, RANK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIPE: tl.constexpr, STAGES: tl.constexpr,
    NEED_A: tl.constexpr, NEED_X: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = R0 + R1 + R2
    blocks = tl.cdiv(columns, COLUMNS)
    stripe = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    masked_col = col + first_column
    threshold = threshold.to(tl.uint32)
    a0 = tl.trans(load_factor(a_ptr, col, columns, 1, R0, columns, RANK))
    d0 = tl.zeros((COLUMNS, RANK), tl.float32)
    if R1 > 0:
        a1 = tl.trans(load_factor(a_ptr + R0 * columns, col, columns, 1, R1, columns, RANK))
        d1 = tl.zeros((COLUMNS, RANK), tl.float32)
    if R2 > 0:
        a2 = tl.trans(load_factor(a_ptr + (R0 + R1) * columns, col, columns, 1, R2, columns, RANK))
        d2 = tl.zeros((COLUMNS, RANK), tl.float32)
    for step in tl.range(0, STRIPE // ROWS, num_stages=STAGES):
        row = stripe * STRIPE + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (col < columns)[None, :]
        at = row.to(tl.int64)[:, None]
        if NEED_A:
            x = tl.load(x_ptr + at * x_stride + col[None, :], mask=inside, other=0.0)
        v = load_factor(v_ptr, row, rows, R, R0, 1, RANK)
        keep = _mask(seed_ptr, row, masked_col, threshold)
        if NEED_A:
            d0 = tl.dot(tl.trans(tl.where(keep, x, 0.0)), v, d0, input_precision="ieee")
        if NEED_X:
            dx = tl.where(keep, tl.dot(v, a0, input_precision="ieee"), 0.0)
        if R1 > 0:
            v = load_factor(v_ptr + R0, row, rows, R, R1, 1, RANK)
            keep = _mask(seed_ptr + 1, row, masked_col, threshold)
            if NEED_A:
                d1 = tl.dot(tl.trans(tl.where(keep, x, 0.0)), v, d1, input_precision="ieee")
            if NEED_X:
                dx += tl.where(keep, tl.dot(v, a1, input_precision="ieee"), 0.0)
        if R2 > 0:
            v = load_factor(v_ptr + R0 + R1, row, rows, R, R2, 1, RANK)
            keep = _mask(seed_ptr + 2, row, masked_col, threshold)
            if NEED_A:
                d2 = tl.dot(tl.trans(tl.where(keep, x, 0.0)), v, d2, input_precision="ieee")
            if NEED_X:
                dx += tl.where(keep, tl.dot(v, a2, input_precision="ieee"), 0.0)
        if NEED_X:
            element = dx_ptr + at * columns + col[None, :]
            dx *= scale
            if ACCUMULATE:
                dx += tl.load(element, mask=inside, other=0.0).to(tl.float32)
            tl.store(element, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if NEED_A:
        out = sum_ptr + stripe.to(tl.int64) * R * columns
        store_factor(out, d0 * scale, col, columns, 1, R0, columns, RANK)
        if R1 > 0:
            store_factor(out + R0 * columns, d1 * scale, col, columns, 1, R1, columns, RANK)
        if R2 > 0:
            store_factor(out + (R0 + R1) * columns, d2 * scale, col, columns, 1, R2, columns, RANK)


_products_launcher, _gradients_launcher = Launcher(_products), Launcher(_gradients)


def _obstacle(x: Tensor, factors: Sequence[Tensor], *_: Any) -> str | None:
    device = device_of(x)
    if device.backend == "cuda" and not device.at_least(AMPERE):
        return "needs an Ampere GPU or newer"
    if x.dtype is torch.float64 or len(factors) > MOST_ADAPTERS:
        return "takes 16 and 32 bits, and up to three adapters"
    return f"takes ranks of up to {MOST_RANKS} in all" if len(factors) * _padded(factors) > MOST_RANKS else None


def _padded(factors: Sequence[Tensor]) -> int:
    """The largest rank, padded for tensor cores."""
    return max(power_of_2(max(len(factor) for factor in factors)), 16)


def _stripe(blocks: int, size: int) -> int:
    """Size of the part that a program iterates over."""
    return next((stripe for stripe in STRIPES if blocks * ceil_div(size, stripe) >= PROGRAMS), STRIPES[-1])


def _ranks(factors: Sequence[Tensor]) -> tuple[int, ...]:
    """Rank of each adapter, 0 for absent ones, and the padded rank."""
    ranks = [len(factor) for factor in factors]
    return *ranks, *(0,) * (MOST_ADAPTERS - len(ranks)), _padded(factors)


@reference.dropped_products.kernel("cuda", "xpu", unless=_obstacle)
def products(x: Tensor, factors: Sequence[Tensor], dropout: Dropout) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    ranks = _ranks(factors)
    tile = TILES[x.element_size()]
    stripe = _stripe(ceil_div(rows, tile), columns)
    partial = torch.empty(ceil_div(columns, stripe), rows, sum(ranks[:3]), dtype=torch.float32, device=x.device)
    if partial.numel():
        numbers = rows, columns, x.stride(0), dropout.first_column, dropout.threshold, dropout.scale
        _products_launcher(
            ceil_div(rows, tile) * len(partial), (x, factors[0], dropout.seeds, partial), numbers,
            (*ranks, tile, tile, stripe, STAGES), warps=4,
        )  # fmt: skip
    return partial.sum(0).to(x.dtype)


@reference.dropped_gradients.kernel("cuda", "xpu", unless=_obstacle)
def gradients(
    v: Tensor, factors: Sequence[Tensor], dropout: Dropout, x: Tensor | None, dx: Tensor | None, accumulate: bool
) -> list[Tensor | None]:
    rows, columns = len(v), factors[0].shape[1]
    ranks = _ranks(factors)
    tile = TILES[v.element_size()]
    x = x if x is None or x.stride(1) == 1 else x.contiguous()
    stripe = _stripe(ceil_div(columns, tile), rows)
    parts = 0 if x is None else ceil_div(rows, stripe)
    sums = torch.empty(parts, sum(ranks[:3]), columns, dtype=torch.float32, device=v.device)
    if v.numel() and columns and (x is not None or dx is not None):
        row = columns if x is None else x.stride(0)
        numbers = rows, columns, row, dropout.first_column, dropout.threshold, dropout.scale
        _gradients_launcher(
            ceil_div(columns, tile) * ceil_div(rows, stripe),
            (v, factors[0], dropout.seeds, v if x is None else x, v if dx is None else dx, sums), numbers,
            (*ranks, tile, tile, stripe, STAGES, x is not None, dx is not None, accumulate), warps=4,
        )  # fmt: skip
    if dx is not None:
        bump_versions(dx)
    return [None] * len(factors) if x is None else [*sums.sum(0).split([len(factor) for factor in factors])]
