"""Triton: the parts of a Muon step, for all matrices of one shape in one launch each.

Bytes per element with fp32 weights and gradients: `directions` moves 14 (gradient, momentum twice, bf16 direction), and
`apply_directions` 10. The torch reference, which stacks weights, gradients and momenta, moves about 110. A tile is one
block of the 8-bit momentum, so each scale belongs to one program.

A kernel that computed only the lower triangle of the symmetric products, 36 of 64 tiles for 1,024 rows, took as long as
torch.bmm (H100, November 2026).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import muon as reference
from ...ops.optimizer import Parameters
from .. import parameter_tables
from ..operands import bump_versions
from ..parameter_tables import TILE, tables
from .launch import Launcher
from .optimizer import DTYPES, _load, _pointer, _store

assert TILE == reference.BLOCK
WARPS = 4
COLUMNS = tl.constexpr(parameter_tables.COLUMNS)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _direction_tile(
    entry, out, start, left, momentum, gradient_share, gradient_scale,
    GRADIENT: tl.constexpr, NARROW: tl.constexpr, NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, TILE)
    g = _load(_pointer(tl.load(entry + 3), GRADIENT, ALIGNED) + start, at, left, MASKED).to(tl.float32)
    g = g / gradient_scale
    if NARROW:
        codes = _pointer(tl.load(entry + 5), tl.int8, ALIGNED) + start
        scales = _pointer(tl.load(entry + 6), tl.float32, False) + start // TILE
        mean = _load(codes, at, left, MASKED).to(tl.float32) * tl.load(scales)
    else:
        held = _pointer(tl.load(entry + 5), tl.float32, ALIGNED) + start
        mean = _load(held, at, left, MASKED)
    mean = mean + gradient_share * (g - mean)
    u = mean
    if NESTEROV:
        u = g + momentum * (mean - g)
    if NARROW:
        scale = tl.div_rn(tl.max(tl.abs(mean), axis=0), 127.0)
        ratio = tl.div_rn(mean, tl.maximum(scale, TINY))
        # adding and subtracting 1.5·2^23 rounds to the nearest even integer
        _store(codes, at, (ratio + 12582912.0 - 12582912.0).to(tl.int8), left, MASKED)
        tl.store(scales, scale)
    else:
        _store(held, at, mean, left, MASKED)
    _store(out, at, u.to(out.dtype.element_ty), left, MASKED)


@triton.jit
def _directions(
    tiles_ptr, table_ptr, out_ptr, scale_ptr, found_ptr, momentum, gradient_share,
    GRADIENT: tl.constexpr, NARROW: tl.constexpr, NESTEROV: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if HAS_FOUND:  # noqa: SIM102  (a constant of the compiler, unlike the inner condition)
        if tl.load(found_ptr) != 0:
            return
    tile = tiles_ptr + tl.program_id(0) * 2
    number = tl.load(tile).to(tl.int64)
    entry = table_ptr + number * COLUMNS
    size = tl.load(entry)
    start = tl.load(tile + 1).to(tl.int64) * TILE
    left = size - start
    gradient_scale = 1.0
    if HAS_SCALE:
        gradient_scale = tl.load(scale_ptr).to(tl.float32)
    offset = number * size + start
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    if left >= TILE:
        _direction_tile(
            entry, out_ptr + offset, start, left, momentum, gradient_share, gradient_scale,
            GRADIENT, NARROW, NESTEROV, ALIGNED, False, TILE,
        )  # fmt: skip
    else:
        _direction_tile(
            entry, out_ptr + offset, start, left, momentum, gradient_share, gradient_scale,
            GRADIENT, NARROW, NESTEROV, ALIGNED, True, TILE,
        )  # fmt: skip


@triton.jit
def _apply_tile(
    entry, directions, start, left, decay, rate,
    WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, TILE)
    weight = _pointer(tl.load(entry + 2), WEIGHT, ALIGNED) + start
    p = _load(weight, at, left, MASKED).to(tl.float32)
    p = p * decay - rate * _load(directions, at, left, MASKED).to(tl.float32)
    _store(weight, at, p.to(WEIGHT), left, MASKED)


@triton.jit
def _apply(
    tiles_ptr, table_ptr, found_ptr, lr_ptr, broken_ptr, weight_decay, scale,
    WEIGHT: tl.constexpr, HAS_FOUND: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    if HAS_FOUND:  # noqa: SIM102  (a constant of the compiler, unlike the inner condition)
        if tl.load(broken_ptr) != 0:
            return
    tile = tiles_ptr + tl.program_id(0) * 2
    number = tl.load(tile).to(tl.int64)
    entry = table_ptr + number * COLUMNS
    size = tl.load(entry)
    start = tl.load(tile + 1).to(tl.int64) * TILE
    left = size - start
    lr = tl.load(lr_ptr).to(tl.float32)
    decay, rate = 1.0 - lr * weight_decay, lr * scale
    offset = number * size + start
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    if left >= TILE:
        _apply_tile(entry, found_ptr + offset, start, left, decay, rate, WEIGHT, ALIGNED, False, TILE)
    else:
        _apply_tile(entry, found_ptr + offset, start, left, decay, rate, WEIGHT, ALIGNED, True, TILE)


_directions_launcher = Launcher(_directions)
_apply_launcher = Launcher(_apply)


def _obstacle(batch: Tensor, parameters: Parameters, *_: Any, **__: Any) -> str | None:
    """Return why the kernels do not take these parameters: they address contiguous memory in known dtypes."""
    tensors = [*parameters.weights, *parameters.gradients]
    if unknown := {tensor.dtype for tensor in (*tensors, batch)} - DTYPES.keys():
        return f"dtype {unknown.pop()}"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "a weight or a gradient is not contiguous"
    return None


@reference.directions.kernel("cuda", "xpu", unless=_obstacle)
def directions(
    out: Tensor,
    parameters: Parameters,
    momentum: float,
    nesterov: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    tiles, table, aligned = tables(parameters, out.device)
    momenta = [state[0][0] for state in parameters.states]
    _directions_launcher(
        len(tiles),
        (tiles, table, out, out if grad_scale is None else grad_scale, out if found_inf is None else found_inf),
        (float(momentum), 1.0 - momentum),
        (
            *(DTYPES[parameters.gradients[0].dtype], momenta[0].dtype == torch.int8, nesterov),
            *(grad_scale is not None, found_inf is not None, aligned and not out[0].numel() % 16, TILE),
        ),
        WARPS,
    )
    bump_versions(*momenta)


@reference.apply_directions.kernel("cuda", "xpu", unless=_obstacle)
def apply_directions(
    directions: Tensor,
    parameters: Parameters,
    lr: Tensor,
    weight_decay: float,
    scale: float,
    found_inf: Tensor | None = None,
) -> None:
    tiles, table, aligned = tables(parameters, directions.device)
    _apply_launcher(
        len(tiles),
        (tiles, table, directions, lr, directions if found_inf is None else found_inf),
        (float(weight_decay), float(scale)),
        (DTYPES[parameters.weights[0].dtype], found_inf is not None, aligned and not directions[0].numel() % 16, TILE),
        WARPS,
    )
    bump_versions(*parameters.weights)
