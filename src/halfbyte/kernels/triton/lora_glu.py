"""Triton: the gated unit with its adapters in one pass over tensors [M, I], with low-rank GEMMs on tensor cores.

A program has a block of columns and iterates over a part of the rows. It reads the adapters' factors of its columns
once, and accumulates sums over rows (dB, dA) in registers. Each block of columns writes partial sums over columns (u_d,
v), each part of the rows writes partial sums over rows; a reduction adds them in a fixed order. The partial sums of v
have v's dtype: one rounding more than PEFT's backward, which rounds s·dy.

Measured on an H200 at [8192, 14336], r = 16: 256 µs forward (three tensors at a copy's bandwidth: 168) and 460 backward
(five: 280). The unit with separate low-rank GEMMs takes 389 and 707.

Tiles are the best of a sweep on that device; smaller ones are for devices with less shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch import Unavailable
from ...formats.float8 import FP8_MAX
from ...ops import lora_glu as reference
from ...ops.fp8_scaling import Slot
from ...ops.glu import Activation
from ...ops.lora_glu import Factors, Gradients
from ..device import device_of
from ..operands import copy_back
from ..tiling import ceil_div, power_of_2
from .dropout import kept, row_keys
from .float8 import float8_obstacle, largest, observe, to_float8
from .glu import activation_and_derivative
from .launch import Launcher

WARPS = 4
KIB = 1024
AMPERE = (8, 0)  # earlier GPUs: Triton does not use tensor cores and spills, and cuBLAS is faster
Tile = tuple[int, int, int]  # rows, columns, pipeline stages
Tiles = dict[tuple[int, int], tuple[tuple[int, Tile], ...]]
# By bytes of a value and padded rank: the shared memory in KiB that a block needs, and the tile. NVIDIA's GPUs have 227
# from Hopper on, A100s 163, other GPUs since 2020 99, and earlier ones 64; AMD's and Intel's have 64. The first tile of
# each row is the best of a sweep on an H200. Without an entry, separate GEMMs are as fast.
FORWARD: Tiles = {
    (2, 16): ((0, (64, 128, 2)),),
    (2, 32): ((99, (64, 128, 2)), (0, (64, 64, 2))),
    (2, 64): ((163, (64, 128, 2)), (99, (64, 64, 2))),
    (4, 16): ((163, (64, 128, 2)), (0, (32, 64, 2))),
    (4, 32): ((227, (64, 128, 2)), (99, (32, 64, 2))),
}
BACKWARD: Tiles = {
    (2, 16): ((0, (64, 64, 3)),),
    (2, 32): ((163, (64, 64, 3)), (99, (64, 64, 2)), (0, (32, 64, 2))),
    (2, 64): ((163, (64, 64, 3)), (99, (32, 64, 2))),
    (4, 16): ((163, (64, 64, 3)), (0, (32, 64, 2))),
    (4, 32): ((227, (64, 64, 3)), (99, (32, 64, 2))),
}
PARTS = (1024, 512, 256)  # rows per program: the most with which there are `PROGRAMS` programs
PROGRAMS = 1024


@triton.jit
def load_factor(ptr, index, size, step, rank: tl.constexpr, rank_step, RANK: tl.constexpr):
    """Load [index, RANK] of a factor, zero outside its size and rank."""
    r = tl.arange(0, RANK)
    mask = (index < size)[:, None] & (r < rank)[None, :]
    return tl.load(ptr + index.to(tl.int64)[:, None] * step + r[None, :] * rank_step, mask=mask, other=0.0)


@triton.jit
def store_factor(ptr, values, index, size, step, rank: tl.constexpr, rank_step, RANK: tl.constexpr):
    r = tl.arange(0, RANK)
    mask = (index < size)[:, None] & (r < rank)[None, :]
    tl.store(ptr + index.to(tl.int64)[:, None] * step + r[None, :] * rank_step, values, mask=mask)


@triton.jit
def _cast(out, values, mask, factors, scale, LIMIT: tl.constexpr, COLUMN_FACTORS: tl.constexpr):
    """Store `values` in FP8 and return them in fp32; values outside the matrix are zeros and do not affect the amax."""
    values = values.to(tl.float32)
    if COLUMN_FACTORS:
        values *= factors[None, :]
    tl.store(out, to_float8(values, scale, LIMIT).to(out.dtype.element_ty), mask=mask)
    return values


@triton.jit
def _put(out, codes, values, mask, factors, scale, amax, LIMIT: tl.constexpr, COLUMN_FACTORS: tl.constexpr):
    """Store `values` in `out` or, if LIMIT > 0, as FP8 `codes`; return the largest magnitude so far."""
    if LIMIT > 0:
        amax = tl.maximum(amax, largest(_cast(codes, values, mask, factors, scale, LIMIT, COLUMN_FACTORS)))
    else:
        tl.store(out, values, mask=mask)
    return amax


@triton.jit
def _dropped(values, seed_ptr, row, col, threshold, scale, DROPOUT: tl.constexpr):
    """`values` with the mask of the down projection's adapter."""
    if DROPOUT:
        first_key, second_key = row_keys(seed_ptr, row)
        keep = kept(first_key, second_key, col, threshold.to(tl.uint32))
        values = tl.where(keep, values.to(tl.float32) * scale, 0.0).to(values.dtype)
    return values


@triton.jit
def _lora_glu(
    gate_ptr, up_ptr, low_ptr, b_gate_ptr, b_up_ptr, a_down_ptr, out_ptr, partial_ptr, cast_ptr, newest_ptr, seed_ptr,
    rows, width, gate_scale, up_scale, first_column, threshold, drop_scale,
    R_GATE: tl.constexpr, R_UP: tl.constexpr, R_DOWN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    block, stripe = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    col = block * COLUMNS + tl.arange(0, COLUMNS)
    b_gate = tl.trans(load_factor(b_gate_ptr, col, width, R_GATE, R_GATE, 1, RANK))
    b_up = tl.trans(load_factor(b_up_ptr, col, width, R_UP, R_UP, 1, RANK))
    a_down = load_factor(a_down_ptr, col, width, 1, R_DOWN, width, RANK)
    # The amax is recorded once, at the end: a branch in the loop would stall its pipeline.
    scale, amax = tl.load(cast_ptr), tl.full((), 0.0, tl.float32)
    for step in tl.range(0, PART // ROWS, num_stages=STAGES):
        row = stripe * PART + step * ROWS + tl.arange(0, ROWS)
        element = row.to(tl.int64)[:, None] * width + col[None, :]
        mask = (row < rows)[:, None] & (col < width)[None, :]
        u_gate = load_factor(low_ptr, row, rows, R_GATE + R_UP, R_GATE, 1, RANK)
        u_up = load_factor(low_ptr + R_GATE, row, rows, R_GATE + R_UP, R_UP, 1, RANK)
        g = tl.load(gate_ptr + element, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + element, mask=mask, other=0.0).to(tl.float32)
        g += gate_scale * tl.dot(u_gate, b_gate, input_precision="ieee")
        u += up_scale * tl.dot(u_up, b_up, input_precision="ieee")
        activated, _ = activation_and_derivative(g, ACTIVATION)
        h = (activated * u).to(gate_ptr.dtype.element_ty)
        amax = _put(out_ptr + element, out_ptr + element, h, mask, scale, scale, amax, LIMIT, False)
        h = _dropped(h, seed_ptr, row, col + first_column, threshold, drop_scale, DROPOUT)
        u_down = tl.dot(h, a_down, input_precision="ieee")
        store_factor(partial_ptr + block.to(tl.int64) * rows * R_DOWN, u_down, row, rows, R_DOWN, R_DOWN, 1, RANK)
    if LIMIT > 0:
        observe(newest_ptr, amax)


@triton.jit
def _lora_glu_backward(
    grad_ptr, gate_ptr, up_ptr, low_ptr, v_down_ptr, b_gate_ptr, b_up_ptr, a_down_ptr, v_ptr, factor_ptr, codes_ptr,
    column_ptr, cast_ptr, newest_ptr, seed_ptr,
    rows, width, gate_scale, up_scale, first_column, threshold, drop_scale,
    R_GATE: tl.constexpr, R_UP: tl.constexpr, R_DOWN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PART: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr, LIMIT: tl.constexpr, COLUMN_FACTORS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS)
    block, stripe = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    col = block * COLUMNS + tl.arange(0, COLUMNS)
    b_gate = load_factor(b_gate_ptr, col, width, R_GATE, R_GATE, 1, RANK)
    b_up = load_factor(b_up_ptr, col, width, R_UP, R_UP, 1, RANK)
    a_down = tl.trans(load_factor(a_down_ptr, col, width, 1, R_DOWN, width, RANK))
    d_gate = tl.zeros((COLUMNS, RANK), tl.float32)
    d_up = tl.zeros((COLUMNS, RANK), tl.float32)
    d_down = tl.zeros((COLUMNS, RANK), tl.float32)
    dtype = gate_ptr.dtype.element_ty
    scale, amax = tl.load(cast_ptr), tl.full((), 0.0, tl.float32)
    if COLUMN_FACTORS:
        gate_factors = tl.load(column_ptr + col, mask=col < width, other=0.0)
        up_factors = tl.load(column_ptr + width + col, mask=col < width, other=0.0)
    else:
        gate_factors, up_factors = scale, scale
    v_row = v_ptr + block.to(tl.int64) * rows * (R_GATE + R_UP)
    for step in tl.range(0, PART // ROWS, num_stages=STAGES):
        row = stripe * PART + step * ROWS + tl.arange(0, ROWS)
        element = row.to(tl.int64)[:, None] * width + col[None, :]
        mask = (row < rows)[:, None] & (col < width)[None, :]
        u_gate = load_factor(low_ptr, row, rows, R_GATE + R_UP, R_GATE, 1, RANK)
        u_up = load_factor(low_ptr + R_GATE, row, rows, R_GATE + R_UP, R_UP, 1, RANK)
        v_down = load_factor(v_down_ptr, row, rows, R_DOWN, R_DOWN, 1, RANK)
        dh = tl.load(grad_ptr + element, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(gate_ptr + element, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + element, mask=mask, other=0.0).to(tl.float32)
        g += gate_scale * tl.dot(u_gate, tl.trans(b_gate), input_precision="ieee")
        u += up_scale * tl.dot(u_up, tl.trans(b_up), input_precision="ieee")
        term = tl.dot(v_down, a_down, input_precision="ieee")
        dh += _dropped(term, seed_ptr, row, col + first_column, threshold, drop_scale, DROPOUT)
        activated, derivative = activation_and_derivative(g, ACTIVATION)
        h = _dropped((activated * u).to(dtype), seed_ptr, row, col + first_column, threshold, drop_scale, DROPOUT)
        d_down = tl.dot(tl.trans(h), v_down, d_down, input_precision="ieee")
        dg = (dh * u * derivative).to(dtype)
        codes = codes_ptr + row.to(tl.int64)[:, None] * (2 * width) + col[None, :]  # of dg; du's follow in the row
        amax = _put(gate_ptr + element, codes, dg, mask, gate_factors, scale, amax, LIMIT, COLUMN_FACTORS)
        d_gate = tl.dot(tl.trans(dg), u_gate, d_gate, input_precision="ieee")
        v = gate_scale * tl.dot(dg, b_gate, input_precision="ieee")
        store_factor(v_row, v, row, rows, R_GATE + R_UP, R_GATE, 1, RANK)
        du = (dh * activated).to(dtype)
        amax = _put(up_ptr + element, codes + width, du, mask, up_factors, scale, amax, LIMIT, COLUMN_FACTORS)
        d_up = tl.dot(tl.trans(du), u_up, d_up, input_precision="ieee")
        v = up_scale * tl.dot(du, b_up, input_precision="ieee")
        store_factor(v_row + R_GATE, v, row, rows, R_GATE + R_UP, R_UP, 1, RANK)
    if LIMIT > 0:
        observe(newest_ptr, amax)
    factor = factor_ptr + stripe.to(tl.int64) * (R_GATE + R_UP + R_DOWN) * width
    store_factor(factor, gate_scale * d_gate, col, width, 1, R_GATE, width, RANK)
    factor += R_GATE * width
    store_factor(factor, up_scale * d_up, col, width, 1, R_UP, width, RANK)
    factor += R_UP * width
    store_factor(factor, d_down, col, width, 1, R_DOWN, width, RANK)


_forward_launcher = Launcher(_lora_glu)
_backward_launcher = Launcher(_lora_glu_backward)


def _grid(rows: int, width: int, columns: int) -> tuple[int, int]:
    """Blocks of columns, and rows per part."""
    blocks = ceil_div(width, columns)
    enough = (stripe_rows for stripe_rows in PARTS if blocks * ceil_div(rows, stripe_rows) >= PROGRAMS)
    return blocks, next(enough, PARTS[-1])


def _padded(rank: int) -> int:
    """Rank, padded for tensor cores."""
    return max(power_of_2(rank), 16)


def _tile(tiles: Tiles, x: Tensor, rank: int) -> Tile | None:
    """The first tile for this dtype and rank that fits in the device's shared memory, or None."""
    shared, row = device_of(x).shared_bytes, tiles.get((x.element_size(), _padded(rank)), ())
    return next((tile for needed, tile in row if needed * KIB <= shared), None)


def _tile_for(tiles: Tiles, gate: Tensor, factors: Factors) -> Tile:
    """`_tile` for callers that have not checked `in_one_pass`.

    Raises:
        Unavailable: no tile fits.
    """
    rank = max(factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0])
    tile = _tile(tiles, gate, rank)
    if tile is None:
        raise Unavailable(f"there is no tile for adapters of rank {rank} in {gate.dtype}")
    return tile


def _constants(factors: Factors, tile: Tile, stripe_rows: int, activation: str) -> tuple:
    ranks = factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]
    tile_rows, columns, stages = tile
    return (
        *ranks, _padded(max(ranks)), tile_rows, columns, stripe_rows, stages, activation, factors.dropout is not None
    )  # fmt: skip


def _mask(factors: Factors) -> tuple[int, int, float]:
    dropout = factors.dropout
    return (0, 0, 1.0) if dropout is None else (dropout.first_column, dropout.threshold, dropout.scale)


@reference.in_one_pass.kernel("cuda", "xpu")
def in_one_pass(x: Tensor, rank: int) -> bool:
    device = device_of(x)
    if device.backend == "cuda" and not device.at_least(AMPERE):
        return False
    return _tile(FORWARD, x, rank) is not None and _tile(BACKWARD, x, rank) is not None


def _forward(gate, up, low, factors: Factors, activation: str, slot: Slot | None) -> tuple[Tensor, Tensor]:
    reference.check_lora_glu(gate, up, low, factors, activation)
    (rows, width), tile = gate.shape, _tile_for(FORWARD, gate, factors)
    blocks, stripe_rows = _grid(rows, width, tile[1])
    out = torch.empty_like(gate) if slot is None else torch.empty_like(gate, dtype=slot.dtype)
    partial = torch.empty(blocks, rows, factors.a_down.shape[0], dtype=torch.float32, device=gate.device)
    cast = (partial, partial) if slot is None else (slot.scale, slot.newest)
    seed = partial if factors.dropout is None else factors.dropout.seeds
    if gate.numel():
        _forward_launcher(
            blocks * ceil_div(rows, stripe_rows),
            (gate, up, low, factors.b_gate, factors.b_up, factors.a_down, out, partial, *cast, seed),
            (rows, width, factors.gate_scale, factors.up_scale, *_mask(factors)),
            (*_constants(factors, tile, stripe_rows, activation), FP8_MAX[slot.dtype] if slot else 0),
            WARPS,
        )
    return out, partial.sum(0).to(gate.dtype)


def _backward(
    grad, gate, up, low, v_down, factors: Factors, activation: str, slot: Slot | None, columns: Tensor | None
) -> tuple[Gradients, Tensor | None]:
    """Write dg and du over gate and up or, with a slot, into the returned codes."""
    reference.check_lora_glu(gate, up, low, factors, activation)
    reference.check_gradients(grad, v_down, gate, factors)
    (rows, width), tile = gate.shape, _tile_for(BACKWARD, gate, factors)
    blocks, stripe_rows = _grid(rows, width, tile[1])
    ranks = [factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]]
    v = torch.empty(blocks, rows, ranks[0] + ranks[1], dtype=gate.dtype, device=gate.device)
    sums = torch.empty(ceil_div(rows, stripe_rows), sum(ranks), width, dtype=torch.float32, device=gate.device)
    codes = None if slot is None else torch.empty(rows, 2 * width, dtype=slot.dtype, device=gate.device)
    cast: tuple = (sums,) * 4
    if slot is not None:
        cast = (codes, sums if columns is None else columns, slot.scale, slot.newest)
    seed = sums if factors.dropout is None else factors.dropout.seeds
    if gate.numel():
        constants = _constants(factors, tile, stripe_rows, activation)
        _backward_launcher(
            blocks * ceil_div(rows, stripe_rows),
            (grad, gate, up, low, v_down, factors.b_gate, factors.b_up, factors.a_down, v, sums, *cast, seed),
            (rows, width, factors.gate_scale, factors.up_scale, *_mask(factors)),
            (*constants, FP8_MAX[slot.dtype] if slot else 0, columns is not None),
            WARPS,
        )
    b_gate, b_up, a_down = sums.sum(0).split(ranks)
    return Gradients(v.sum(0, dtype=torch.float32).to(gate.dtype), b_gate.t(), b_up.t(), a_down), codes


@reference.lora_glu.kernel("cuda", "xpu", rank=2)
def lora_glu(gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: Activation) -> tuple[Tensor, Tensor]:
    return _forward(gate, up, low, factors, activation, None)


@reference.lora_glu_float8.kernel("cuda", "xpu", unless=float8_obstacle, rank=2)
def lora_glu_float8(
    gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: Activation, slot: Slot
) -> tuple[Tensor, Tensor]:
    return _forward(gate, up, low, factors, activation, slot)


@reference.lora_glu_backward_.kernel("cuda", "xpu", rank=2)
def lora_glu_backward_(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: Activation
) -> Gradients:
    gradients, _ = _backward(grad, gate, up, low, v_down, factors, activation, None, None)
    copy_back((gate, up), (gate, up))
    return gradients


@reference.lora_glu_backward_float8.kernel("cuda", "xpu", unless=float8_obstacle, rank=2)
def lora_glu_backward_float8(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    v_down: Tensor,
    factors: Factors,
    activation: Activation,
    slot: Slot,
    columns: Tensor | None,
) -> tuple[Gradients, Tensor | None]:
    return _backward(grad, gate, up, low, v_down, factors, activation, slot, columns)
