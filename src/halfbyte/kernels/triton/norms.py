"""Triton: norms that hold a row in registers, so every byte moves once.

A program computes one wide row or several narrow ones, at least 2,048 values, at 16 values a thread. This gives two
16-byte loads in flight per thread in bf16, and enough programs per multiprocessor to hide one's reduction behind the
others' loads. The floor of an RMSNorm of n values in 16 bits is 4n bytes / bandwidth forward and 6n backward; residual,
sum and residual gradient each add two bytes a value.

The weight's gradient is a sum over all rows. `PARTIALS` programs, two per multiprocessor, accumulate their rows in
registers and write one fp32 row each, which `sum_rows` adds. So few programs do not hide each other's latency, so each
prefetches its next rows into shared memory while it computes.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.float8 import FP8_MAX
from ...ops import norms as reference
from ...ops.checks import check_rows
from ...ops.fp8_scaling import Slot
from ..operands import all_same, empty_contiguous, empty_statistic, evenly_spaced
from ..tiling import ceil_div, power_of_2
from .float8 import float8_obstacle, largest, observe, to_float8
from .launch import Launcher, layouts

TILE = 2048  # values per program for rows narrower than this
VALUES_PER_THREAD = 16
PARTIALS = 264  # rows of partial sums of a weight's gradient
STAGED = 65536  # bytes of shared memory for prefetching, per program


@triton.jit
def _load(pointer, row, stride, col, mask):
    return tl.load(pointer + row[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _factor(weight_ptr, col, D: tl.constexpr, OFFSET: tl.constexpr):
    weight = tl.load(weight_ptr + col, mask=col < D, other=0.0, eviction_policy="evict_last").to(tl.float32)
    return weight + 1.0 if OFFSET else weight


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, rstd_ptr, codes_ptr, cast_ptr, newest_ptr,
    rows, x_stride, residual_stride, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < D)[None, :]
    x = _load(x_ptr, row, x_stride, col, mask)
    factor = _factor(weight_ptr, col, D, OFFSET)
    if RESIDUAL:
        # The sum is rounded before it is normalised, since later layers read it rounded.
        total = (x + _load(residual_ptr, row, residual_stride, col, mask)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row[:, None] * D + col[None, :], total, mask=mask)
        x = total.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    normal = x * rstd[:, None]
    if not OFFSET:
        normal = normal.to(x_ptr.dtype.element_ty).to(tl.float32)
    y = (normal * factor[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * D + col[None, :], y, mask=mask)
    if LIMIT > 0:  # also write y in FP8
        y = tl.where(mask, y.to(tl.float32), 0.0)
        observe(newest_ptr, largest(y))
        codes = to_float8(y, tl.load(cast_ptr), LIMIT).to(codes_ptr.dtype.element_ty)
        tl.store(codes_ptr + row[:, None] * D + col[None, :], codes, mask=mask)


@triton.jit
def _rms_norm_backward(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, residual_ptr, dx_ptr, dw_ptr,
    rows, tiles, grad_stride, x_stride, residual_stride,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr,
    WEIGHT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    factor = _factor(weight_ptr, col, D, OFFSET)
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = (program + tile * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < D)[None, :]
        grad = _load(grad_ptr, row, grad_stride, col, mask)
        x = _load(x_ptr, row, x_stride, col, mask)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normal = x * rstd
        scaled = grad * factor[None, :]
        dx = (scaled - normal * (tl.sum(scaled * normal, axis=1) / D)[:, None]) * rstd
        if RESIDUAL:
            dx += _load(residual_ptr, row, residual_stride, col, mask)
        tl.store(dx_ptr + row[:, None] * D + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT:
            dw += grad * normal
    if WEIGHT:
        tl.store(dw_ptr + program * D + col, tl.sum(dw, axis=0), mask=col < D)


@triton.jit
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, rows, x_stride, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < D)[None, :]
    x = _load(x_ptr, row, x_stride, col, mask)
    factor = _factor(weight_ptr, col, D, False)
    bias = _factor(bias_ptr, col, D, False)
    mean = tl.sum(x, axis=1) / D
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) / D + eps)
    tl.store(mean_ptr + row, mean, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = (centred * rstd[:, None] * factor[None, :] + bias[None, :]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row[:, None] * D + col[None, :], y, mask=mask)


@triton.jit
def _layer_norm_backward(
    grad_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr,
    rows, tiles, grad_stride, x_stride,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    factor = _factor(weight_ptr, col, D, False)
    dw = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    db = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):
        row = (program + tile * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < D)[None, :]
        grad = _load(grad_ptr, row, grad_stride, col, mask)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normal = (_load(x_ptr, row, x_stride, col, mask) - mean) * rstd
        scaled = grad * factor[None, :]  # zero outside the row, so its products need no mask
        centred = scaled - (tl.sum(scaled, axis=1) / D)[:, None]
        dx = (centred - normal * (tl.sum(scaled * normal, axis=1) / D)[:, None]) * rstd
        tl.store(dx_ptr + row[:, None] * D + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WEIGHT:
            dw += grad * normal
            db += grad
    if WEIGHT:
        tl.store(dw_ptr + program * D + col, tl.sum(dw, axis=0), mask=col < D)
        dw_ptr += tl.num_programs(0).to(tl.int64) * D  # the bias's partial sums follow the weight's
        tl.store(dw_ptr + program * D + col, tl.sum(db, axis=0), mask=col < D)


_rms_norm_launcher = Launcher(_rms_norm)
_rms_norm_backward_launcher = Launcher(_rms_norm_backward)
_layer_norm_launcher = Launcher(_layer_norm)
_layer_norm_backward_launcher = Launcher(_layer_norm_backward)


@functools.cache
def _blocks(width: int) -> tuple[int, int, int]:
    """Rows per program, their width padded to a power of two, and warps."""
    block = power_of_2(width)
    rows = max(TILE // block, 1)
    return rows, block, min(max(rows * block // (32 * VALUES_PER_THREAD), 4), 16)


def _programs(rows: int, rows_per_tile: int, need_weight: bool) -> tuple[int, int]:
    """Number of programs, and tiles of rows per program: one, unless a weight's gradient needs few partial sums."""
    all_tiles = ceil_div(rows, rows_per_tile)
    tiles = ceil_div(all_tiles, PARTIALS) if need_weight else 1
    return ceil_div(all_tiles, tiles), tiles


def _stages(values: int, x: Tensor, need_weight: bool) -> int:
    """Pipeline stages for tiles of `values` values, of which x, the gradient and the residual's each have one."""
    return min(3, 1 + STAGED // (3 * values * x.element_size())) if need_weight else 1


def _normed(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool, slot: Slot | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, sum, rstd, and y's FP8 codes with a slot; without one y again."""
    y, rstd = empty_contiguous(x, reference.normed_dtype(x, weight, offset)), empty_statistic(x)
    total = x if residual is None else empty_contiguous(x, x.dtype)
    codes = y if slot is None else empty_contiguous(y, slot.dtype)
    inputs = (x, x if residual is None else residual, weight)
    outputs = (y, total, rstd, codes, *((rstd, rstd) if slot is None else (slot.scale, slot.newest)))
    key = (eps, offset, residual is None, codes.dtype, *layouts(*inputs))
    if _rms_norm_launcher.repeat(key, inputs + outputs):
        return y, total, rstd, codes
    reference.check_rms_norm(x, residual, weight)
    width, rows = x.shape[-1], rstd.numel()
    if not rows or not width:
        return y, total, rstd, codes
    (x, x_stride), (added, added_stride) = evenly_spaced(x), evenly_spaced(inputs[1])
    used = (x, added, weight)
    rows_per_program, block, warps = _blocks(width)
    _rms_norm_launcher(
        ceil_div(rows, rows_per_program), used + outputs, (rows, x_stride, added_stride, eps),
        (width, rows_per_program, block, offset, residual is not None, FP8_MAX[slot.dtype] if slot else 0), warps,
        key if all_same(used, inputs) else None,
    )  # fmt: skip
    return y, total, rstd, codes


@reference.rms_norm.kernel("cuda", "xpu")
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _normed(x, residual, weight, eps, offset, None)[:3]


@reference.rms_norm_float8.kernel("cuda", "xpu", unless=float8_obstacle)
def rms_norm_float8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool, slot: Slot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _normed(x, residual, weight, eps, offset, slot)


@reference.rms_norm_backward.kernel("cuda", "xpu")
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: bool,
    residual_grad: Tensor | None,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    dx = empty_contiguous(x, x.dtype)
    inputs = (grad, x, weight, rstd, x if residual_grad is None else residual_grad)
    key = (offset, residual_grad is None, *layouts(*inputs))
    if not need_weight and _rms_norm_backward_launcher.repeat(key, (*inputs, dx, rstd)):
        return dx, None
    check_rows("rms_norm_backward", grad, x, rstd, residual_grad)
    width, rows = x.shape[-1], rstd.numel()
    if not rows or not width:
        return dx, torch.zeros_like(weight) if need_weight else None
    (grad, grad_stride), (x, x_stride), (added, added_stride) = map(evenly_spaced, (grad, x, inputs[-1]))
    used = (grad, x, weight, rstd, added)
    rows_per_tile, block, warps = _blocks(width)
    programs, tiles = _programs(rows, rows_per_tile, need_weight)
    dw = torch.empty(programs, width, dtype=torch.float32, device=x.device) if need_weight else rstd
    _rms_norm_backward_launcher(
        programs, (*used, dx, dw), (rows, tiles, grad_stride, x_stride, added_stride),
        (width, rows_per_tile, block, offset, residual_grad is not None, need_weight,
         _stages(rows_per_tile * block, x, need_weight)), warps,
        key if all_same(used, inputs) and not need_weight else None,
    )  # fmt: skip
    return dx, reference.sum_rows(dw, weight.dtype)[0] if need_weight else None


@reference.layer_norm.kernel("cuda", "xpu")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    reference.check_layer_norm(x, weight, bias)
    width = x.shape[-1]
    y = empty_contiguous(x, x.dtype)
    mean = empty_statistic(x)
    rstd = empty_statistic(x)
    rows = rstd.numel()
    if not rows or not width:
        return y, mean, rstd
    x, x_stride = evenly_spaced(x)
    rows_per_program, block, warps = _blocks(width)
    _layer_norm_launcher(
        ceil_div(rows, rows_per_program), (x, weight, bias, y, mean, rstd), (rows, x_stride, eps),
        (width, rows_per_program, block), warps,
    )  # fmt: skip
    return y, mean, rstd


@reference.layer_norm_backward.kernel("cuda", "xpu")
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    check_rows("layer_norm_backward", grad, x, rstd, None)
    width, rows = x.shape[-1], rstd.numel()
    dx = empty_contiguous(x, x.dtype)
    if not rows or not width:
        zeros = torch.zeros_like(weight) if need_weight else None
        return dx, zeros, zeros.clone() if zeros is not None else None
    (grad, grad_stride), (x, x_stride) = evenly_spaced(grad), evenly_spaced(x)
    rows_per_tile, block, warps = _blocks(width)
    programs, tiles = _programs(rows, rows_per_tile, need_weight)
    sums = torch.empty(2 * programs, width, dtype=torch.float32, device=x.device) if need_weight else rstd
    _layer_norm_backward_launcher(
        programs, (grad, x, weight, mean, rstd, dx, sums), (rows, tiles, grad_stride, x_stride),
        (width, rows_per_tile, block, need_weight, _stages(rows_per_tile * block, x, need_weight)), warps,
    )  # fmt: skip
    if not need_weight:
        return dx, None, None
    dw, db = reference.sum_rows(sums, weight.dtype, programs)
    return dx, dw, db


SUM_TILE = 8192  # values that a program reads at a time


@triton.jit
def _sum_rows(partial_ptr, out_ptr, rows, first, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    section = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    start = section * first
    end = tl.where(section == 0, first, rows)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(start, end, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < end)[:, None] & (col < D)[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64)[:, None] * D + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + section * D + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < D)


_sum_rows_launcher = Launcher(_sum_rows)


@reference.sum_rows.kernel("cuda", "xpu")
def sum_rows(partials: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
    rows, width = partials.shape
    columns = 32 if width >= 2048 else 8  # 128 or 32 bytes of a row: enough programs for narrow rows, too
    sections = 1 if first is None else 2
    out = torch.empty(sections, width, dtype=dtype, device=partials.device)
    _sum_rows_launcher(
        sections * ceil_div(width, columns), (partials, out), (rows, rows if first is None else first),
        (width, SUM_TILE // columns, columns), 8,
    )  # fmt: skip
    return out
