"""Triton: the parts of a Muon step, for all matrices of one shape in one launch each.

Bytes per element with fp32 weights and gradients: `directions` moves 14 (gradient, momentum twice, bf16 direction), and
`apply_directions` 10. The torch reference, which stacks weights, gradients and momenta, moves about 110. A tile is one
block of the 8-bit momentum, so each scale belongs to one program.

`symmetric_product` computes the tiles of the lower triangle and stores each twice: 36 of 64 tiles for 1,024 rows. So it
takes less time than torch.bmm from 56% of its rate. baddbmm also copies the matrix that it adds. Not timed yet.
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
from ..device import device_of
from ..operands import bump_versions
from ..parameter_tables import TILE, tables
from ..tiling import ceil_div
from .launch import Launcher
from .optimizer import DTYPES, _load, _pointer, _store

assert TILE == reference.BLOCK
WARPS = 4
SIDE, DEPTH = 128, 64  # of a tile of a symmetric product: 3 stages take 96 KiB of shared memory
AMPERE = (8, 0)
FEWEST_ROWS = 256  # of a symmetric product; smaller ones have too few tiles off the diagonal
COLUMNS = tl.constexpr(parameter_tables.COLUMNS)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _direction_tile(
    entry, out, start, left, momentum, rest, gradient_scale,
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
    mean = mean + rest * (g - mean)
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
    tiles_ptr, table_ptr, out_ptr, scale_ptr, found_ptr, momentum, rest,
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
            entry, out_ptr + offset, start, left, momentum, rest, gradient_scale,
            GRADIENT, NARROW, NESTEROV, ALIGNED, False, TILE,
        )  # fmt: skip
    else:
        _direction_tile(
            entry, out_ptr + offset, start, left, momentum, rest, gradient_scale,
            GRADIENT, NARROW, NESTEROV, ALIGNED, True, TILE,
        )  # fmt: skip


@triton.jit
def _apply_tile(
    entry, found, start, left, kept, rate,
    WEIGHT: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, TILE)
    weight = _pointer(tl.load(entry + 2), WEIGHT, ALIGNED) + start
    p = _load(weight, at, left, MASKED).to(tl.float32)
    p = p * kept - rate * _load(found, at, left, MASKED).to(tl.float32)
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
    kept, rate = 1.0 - lr * weight_decay, lr * scale
    offset = number * size + start
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    if left >= TILE:
        _apply_tile(entry, found_ptr + offset, start, left, kept, rate, WEIGHT, ALIGNED, False, TILE)
    else:
        _apply_tile(entry, found_ptr + offset, start, left, kept, rate, WEIGHT, ALIGNED, True, TILE)


@triton.jit
def _symmetric(
    x_ptr, added_ptr, out_ptr, rows, columns, tiles, beta, alpha,
    TRANSPOSED: tl.constexpr, HAS_ADDED: tl.constexpr, EVEN: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile below or on the diagonal, and its mirror image."""
    number = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    i = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)  # the root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    x = x_ptr + number * rows * columns
    square = number * rows * rows
    down = i * SIDE + tl.arange(0, SIDE)
    across = j * SIDE + tl.arange(0, SIDE)
    inner = tl.arange(0, DEPTH)
    if TRANSPOSED:
        left = x + down[:, None] + inner[None, :].to(tl.int64) * rows
        right = x + across[None, :] + inner[:, None].to(tl.int64) * rows
    else:
        left = x + down[:, None].to(tl.int64) * columns + inner[None, :]
        right = x + across[None, :].to(tl.int64) * columns + inner[:, None]
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, columns, DEPTH):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, mask=(down[:, None] < rows) & (inner[None, :] < columns - start), other=0.0)
            b = tl.load(right, mask=(across[None, :] < rows) & (inner[:, None] < columns - start), other=0.0)
        total = tl.dot(a, b, total)
        if TRANSPOSED:
            left += DEPTH * rows
            right += DEPTH * rows
        else:
            left += DEPTH
            right += DEPTH
    total *= alpha
    at = square + down[:, None].to(tl.int64) * rows + across[None, :]
    inside = (down[:, None] < rows) & (across[None, :] < rows)
    if HAS_ADDED:
        total += beta * tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
    found = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, found, mask=inside)
    if i != j:
        mirrored = square + across[:, None].to(tl.int64) * rows + down[None, :]
        tl.store(out_ptr + mirrored, tl.trans(found), mask=(across[:, None] < rows) & (down[None, :] < rows))


_directions_launcher = Launcher(_directions)
_apply_launcher = Launcher(_apply)
_symmetric_launcher = Launcher(_symmetric, num_stages=3)


def _symmetric_obstacle(x: Tensor, added: Tensor | None = None, *_: Any, **__: Any) -> str | None:
    device = device_of(x)
    if device.kind != "cpu" and not device.at_least(AMPERE):
        return "needs tensor cores for bf16: an NVIDIA GPU of compute capability 8.0 or newer"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    if x.shape[1] < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS} rows"
    if not (x.is_contiguous() or x.mT.is_contiguous()) or not (added is None or added.is_contiguous()):
        return "strided matrices"
    return None


@reference.symmetric_product.kernel("cuda", unless=_symmetric_obstacle)
def symmetric_product(x: Tensor, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    count, rows, columns = x.shape
    out = x.new_empty(count, rows, rows)
    side = ceil_div(rows, SIDE)
    tiles = side * (side + 1) // 2
    _symmetric_launcher(
        count * tiles,
        (x, out if added is None else added, out),
        (rows, columns, tiles, float(beta), float(alpha)),
        (not x.is_contiguous(), added is not None, not rows % SIDE and not columns % DEPTH, SIDE, DEPTH),
        WARPS,
    )
    return out


def _obstacle(batch: Tensor, parameters: Parameters, *_: Any, **__: Any) -> str | None:
    """Return why the kernels do not take these parameters: they address contiguous memory in known dtypes."""
    tensors = [*parameters.weights, *parameters.gradients]
    if unknown := {each.dtype for each in (*tensors, batch)} - DTYPES.keys():
        return f"dtype {unknown.pop()}"
    if not all(each.is_contiguous() for each in tensors):
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
    found: Tensor,
    parameters: Parameters,
    lr: Tensor,
    weight_decay: float,
    scale: float,
    found_inf: Tensor | None = None,
) -> None:
    tiles, table, aligned = tables(parameters, found.device)
    _apply_launcher(
        len(tiles),
        (tiles, table, found, lr, found if found_inf is None else found_inf),
        (float(weight_decay), float(scale)),
        (DTYPES[parameters.weights[0].dtype], found_inf is not None, aligned and not found[0].numel() % 16, TILE),
        WARPS,
    )
    bump_versions(*parameters.weights)
