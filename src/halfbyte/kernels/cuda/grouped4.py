"""`cuda/grouped.cuh`: products of a mixture's experts with 4-bit weights, decoded in registers, by Hopper's wgmma.

Measured on an H200 at Qwen3-30B-A3B's shape, 128 experts, NF4, in µs beside `F.grouped_mm` (gm) on 16-bit weights and
Triton's kernel, which decodes in its main loop:

    rows an   gate and up            down
    expert    gm    wgmma  Triton    gm    wgmma  Triton
    1/16      33    19               24    17
    1         192   65     156       118   43     88
    2         260   84               147   52
    16        272   122    264       157   77     128
    32        259   148    299       155   99     153
    64        265   319    416       152   211    214
    128       356   551    600       203   361    298

With 64 rows an expert, tiles of 64 take 237 and 158. Tiles of 256 × 128, which have registers for it where weights are
scaled before they are multiplied, take 222 at 64 rows and 372 at 128, and their weights are rounded three times.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...formats.blockwise4 import Blockwise4
from ...ops import experts as reference
from ...ops.experts import LowRank, Routing, StackedWeight
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered
from .gemm4 import ADDED, COPYING, STEP, Blocks, _Term, wgmma_capability
from .gemv4 import BLOCKSIZE, Weight, mma_obstacle, weight_of

ROWS = 128  # of x in a tile at most


class _Grouped(ctypes.Structure):
    """The struct `Grouped` of `cuda/grouped.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("order", "tiles", "offsets", "bias", "out")),
        ("term", _Term),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("top_k", "entries", "experts", "rows")),
    )


def blocks_for(rows: int) -> Blocks:
    """By rows of x in a tile: as many rows of W as there are registers for."""
    return Blocks(2, 3) if rows > 64 else Blocks(4, 4 if rows <= 32 else 3)


@remembered
def _kernel(blocks: Blocks, device: int, rows: int, bf16: bool, nested: bool) -> tuple[Kernel, Kernel]:
    """What multiplies, and what adds up tiles that several blocks have parts of."""
    constants = {"GROUPS": blocks.groups, "STAGES": blocks.stages, "NT": rows // 8, "BF16": int(bf16)}
    constants |= {"NESTED": int(nested), "ORIGIN": origin_of(device)}
    image = cubin("grouped4", device_at(device).capability, constants, [Weight, _Grouped])
    return Kernel(image, "grouped4"), Kernel(image, "add_grouped", 16)


def obstacle(
    x: Tensor, stack: StackedWeight, routing: Routing, gather: bool = False, turned: bool = False,
    low_rank: LowRank | None = None, bias: Tensor | None = None, alpha: float = 1.0,
) -> str | None:  # fmt: skip
    if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
        return "takes 4-bit weights in blocks of 64"
    if turned or alpha != 1.0:
        return "multiplies by Wᵀ alone"
    if not 0 < routing.tile_rows <= ROWS:
        return f"needs the table of tiles, of up to {ROWS} rows"
    if low_rank is not None and (low_rank.u.shape[1] % 8 or low_rank.u.data_ptr() % 16):
        return "needs the adapter's ranks in multiples of 8, at multiples of 16 bytes"
    return mma_obstacle(x, stack.parts["packed"], stack.parts["absmax"]) or wgmma_capability(x)


@reference.grouped_product.kernel("cuda", unless=obstacle)
def grouped_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    turned: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    blocks: Blocks | None = None,
) -> Tensor:
    slots, width = reference.check_product(x, stack, routing, gather, turned, low_rank, bias)
    x, device, (experts, rows, columns) = x.contiguous(), x.get_device(), stack.shape
    out = torch.empty(slots, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    format_: Any = stack.format
    blocks, nested = blocks or blocks_for(routing.tile_rows), format_.nested_parts(stack.parts)
    weight = weight_of(x, stack.parts["packed"], stack.parts["absmax"], nested, format_.quant_type, experts * rows)
    term, scale = _Term(), 0.0
    if low_rank is not None:
        u, factor, scale = low_rank.u.contiguous(), low_rank.factor.contiguous(), low_rank.scale
        term = _Term(u.data_ptr(), factor.data_ptr(), u.shape[1], u.shape[1])
    tile, entries = 64 * blocks.groups, routing.tiles.shape[0]
    parts = entries * ceil_div(rows, tile) * (columns // STEP)
    grid = min(multiprocessors_of(device), parts)
    partials = torch.empty(2 * grid * tile * routing.tile_rows, dtype=torch.float32, device=x.device)
    pointers = [routing.order, routing.tiles, routing.offsets, bias, out]
    grouped = _Grouped(
        *[None if tensor is None else tensor.data_ptr() for tensor in pointers], term, scale,
        routing.top_k if gather else 0, entries, experts, rows,
    )  # fmt: skip
    given = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, partials)]
    with torch.cuda.device(device):
        product, add = _kernel(blocks, device, routing.tile_rows, x.dtype is torch.bfloat16, nested is not None)
        product(grid, 128 * blocks.groups + COPYING, [weight, grouped, *given])
        if grid > 1:
            pieces = tile * routing.tile_rows // 4 // ADDED  # blocks that add a tile
            add((grid - 1) * pieces, ADDED, [given[1], grouped, ctypes.c_uint32(columns), ctypes.c_uint32(grid)])
    return out
