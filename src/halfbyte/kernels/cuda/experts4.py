"""Mixture of experts with 4-bit weights, decoded in registers, by the number of rows per expert.

`expert_rows`: the MLP of a few tokens in two launches, `expert_rows4.cu`. `grouped_small` and `grouped_large`: grouped
GEMMs by Hopper's wgmma, `grouped.cuh` and `grouped_gemm4.cu`.

Measured on an H200 with Qwen3-30B-A3B's shapes, 128 experts, NF4, in µs: `grouped_small` (wgmma) against `F.grouped_mm`
(gm) on 16-bit weights and Triton's kernel, which decodes in its main loop:

    rows per  gate and up            down
    expert    gm    wgmma  Triton    gm    wgmma  Triton
    1/16      33    19               24    17
    1         192   65     156       118   43     88
    2         260   84               147   52
    16        272   122    264       157   77     128
    32        259   148    299       155   99     153
    64        265   319    416       152   211    214
    128       356   551    600       203   361    298

With 64 rows per expert, tiles of 64 take 237 and 158. Tiles of 256 × 128 need weights that are scaled before the GEMM
to have enough registers; they take 222 at 64 rows and 372 at 128, and round the weights three times.

`grouped_large` (codes), including the decoding of nested scales, against `F.grouped_mm` (gm) on 16-bit weights and
gathered rows. z is grad · W of the down projection.

    rows per  gate and up   down          dX of gate and up   z
    expert    gm    codes   gm    codes   gm    codes         gm    codes
    64        268   277     158   145     278   260           142   143
    128       373   429     207   216     373   385           190   226
    256       440   692     260   337     451   607           231   341
    512       716   1,225   413   588     727   1,070         368   584

Decoding the stacks first takes another 254 and 130. With parts of the kernel removed, gate and up at 512 rows take
1,188 (complete), 808 (without decoding), 710 (without GEMMs). Copies of x by cp.async (3.8 TB/s from the L2 cache)
seem to be the bound from 256 rows on, along with decoding's use of shared memory. Tiles of 128 channels by 256 rows
take as long (1,249), four groups of 64 rows longer.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import Blockwise4
from ...formats.codebooks import codebook4
from ...ops import experts as reference
from ...ops.experts import LowRank, Routing, StackedWeight, Unit
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemm4, remembered
from .gemv4 import BLOCKSIZE, STEP, Weight, mma_obstacle, weight_of

SLOTS = 16  # over all tokens; with more, tokens share experts and grouped GEMMs read each expert once
TILE_ROWS = 16  # rows of W per tile
# By kernel: groups per block, warps per group, and prefetched units. On an H200 a token of Qwen3-30B-A3B takes 13.9 µs
# in both kernels with these, and 13.9 to 20 with others.
MLP_GROUPS = (2, 8, 2), (1, 12, 1)


class _Table(ctypes.Structure):
    """The struct `Table4` of `cuda/table4.cuh`."""

    _fields_ = Weight._fields_[:-1]


_TABLE_FIELDS = [field[0] for field in _Table._fields_]


class _Chosen(ctypes.Structure):
    """The struct `Chosen` of `cuda/expert_rows4.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "experts", "weights", "out")),
        *((name, ctypes.c_uint32) for name in ("tokens", "top_k", "wide")),
    )


@remembered
def _mlp_kernel(down: int, groups: tuple[int, int, int], device: int, bf16: bool, nested: bool) -> Kernel:
    constants = {
        "DOWN": down,
        "WR": groups[0],
        "WK": groups[1],
        "AHEAD": groups[2],
        "NESTED": int(nested),
        "BF16": int(bf16),
    }
    constants |= {"ORIGIN": origin_of(device)}
    return Kernel(cubin("expert_rows4", device_at(device).capability, constants, [_Table, _Chosen]), "expert_rows4")


def mlp_obstacle(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor
) -> str | None:
    if index.numel() > SLOTS or index.dtype is not torch.int64:
        return f"takes int64 choices, {SLOTS} at most"
    if unit.activation != "silu" or not unit.plain or unit.interleaved:
        return "computes silu(gate) · up, gate first"
    for stack in (first, second):
        if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
            return "takes 4-bit weights in blocks of 64"
        if stack.shape[1] % TILE_ROWS or stack.shape[2] % STEP:
            return "needs N in multiples of 16, and K of 256"
    if routed.dtype not in (x.dtype, torch.float32):
        return "takes weights in x's dtype or fp32"
    return mma_obstacle(x, first.parts["packed"], second.parts["packed"])


@reference.expert_rows.kernel("cuda", unless=mlp_obstacle)
def expert_rows(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor,
    groups: Any = MLP_GROUPS,
) -> Tensor:  # fmt: skip
    (tokens, top_k) = index.shape
    device = x.get_device()
    rows_in = x.contiguous()
    index, routed = index.contiguous(), routed.contiguous()
    with torch.cuda.device(device):
        for down, stack in enumerate((first, second)):
            format_: Any = stack.format
            rows, nested = stack.shape[1], format_.nested_parts(stack.parts)
            shape = (tokens, rows) if down else (tokens * top_k, rows // 2)
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            weight = weight_of(rows_in, stack.parts["packed"], stack.parts["absmax"], nested, format_.quant_type, rows)
            table = _Table(*[getattr(weight, name) for name in _TABLE_FIELDS])
            pointers = [tensor.data_ptr() for tensor in (rows_in, index, routed, out)]
            chosen = _Chosen(*pointers, tokens, top_k, int(routed.dtype is torch.float32))
            kernel = _mlp_kernel(down, groups[down], device, x.dtype is torch.bfloat16, nested is not None)
            tiles = rows // TILE_ROWS * tokens * (1 if down else top_k)
            grid = min(ceil_div(tiles, groups[down][0]), multiprocessors_of(device))
            kernel(grid, 32 * groups[down][0] * groups[down][1], [table, chosen])
            rows_in = out
    return rows_in


SMALL_ROWS = 128  # most rows of x per tile


class _Grouped(ctypes.Structure):
    """The struct `Grouped` of `cuda/grouped.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("order", "tiles", "offsets", "bias", "out")),
        ("term", gemm4.Term),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("top_k", "entries", "experts", "rows")),
    )


def small_blocks(rows: int) -> gemm4.Blocks:
    """Blocks by rows of x per tile: as many rows of W as registers permit."""
    return gemm4.Blocks(2, 3) if rows > 64 else gemm4.Blocks(4, 4 if rows <= 32 else 3)


@remembered
def _small_kernel(blocks: gemm4.Blocks, device: int, rows: int, bf16: bool, nested: bool) -> tuple[Kernel, Kernel]:
    """The GEMM, and the kernel that adds tiles of which several blocks have parts."""
    constants = {"GROUPS": blocks.groups, "STAGES": blocks.stages, "NT": rows // 8, "BF16": int(bf16)}
    constants |= {"NESTED": int(nested), "ORIGIN": origin_of(device)}
    image = cubin("grouped4", device_at(device).capability, constants, [Weight, _Grouped])
    return Kernel(image, "grouped4"), Kernel(image, "add_grouped", 16)


def small_obstacle(
    x: Tensor, stack: StackedWeight, routing: Routing, gather: bool = False, transposed: bool = False,
    low_rank: LowRank | None = None, bias: Tensor | None = None, alpha: float = 1.0,
) -> str | None:  # fmt: skip
    if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
        return "takes 4-bit weights in blocks of 64"
    if transposed or alpha != 1.0:
        return "multiplies by Wᵀ alone"
    if not 0 < routing.tile_rows <= SMALL_ROWS:
        return f"needs the table of tiles, of up to {SMALL_ROWS} rows"
    if low_rank is not None and (low_rank.u.shape[1] % 8 or low_rank.u.data_ptr() % 16):
        return "needs the adapter's ranks in multiples of 8, at multiples of 16 bytes"
    return mma_obstacle(x, stack.parts["packed"], stack.parts["absmax"]) or gemm4.wgmma_capability(x)


@reference.grouped_product.kernel("cuda", unless=small_obstacle)
def grouped_small(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    transposed: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    blocks: gemm4.Blocks | None = None,
) -> Tensor:
    slots, width = reference.check_product(x, stack, routing, gather, transposed, low_rank, bias)
    x = x.contiguous()
    device = x.get_device()
    (experts, rows, columns) = stack.shape
    out = torch.empty(slots, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    format_: Any = stack.format
    blocks, nested = blocks or small_blocks(routing.tile_rows), format_.nested_parts(stack.parts)
    weight = weight_of(x, stack.parts["packed"], stack.parts["absmax"], nested, format_.quant_type, experts * rows)
    term, scale = gemm4.Term(), 0.0
    if low_rank is not None:
        u = low_rank.u.contiguous()
        factor = low_rank.factor.contiguous()
        scale = low_rank.scale
        term = gemm4.Term(u.data_ptr(), factor.data_ptr(), u.shape[1], u.shape[1])
    tile, entries = 64 * blocks.groups, routing.tiles.shape[0]
    units = entries * ceil_div(rows, tile) * (columns // gemm4.STEP)
    grid = min(multiprocessors_of(device), units)
    partials = torch.empty(2 * grid * tile * routing.tile_rows, dtype=torch.float32, device=x.device)
    pointers = [routing.order, routing.tiles, routing.offsets, bias, out]
    grouped = _Grouped(
        *[None if tensor is None else tensor.data_ptr() for tensor in pointers], term, scale,
        routing.top_k if gather else 0, entries, experts, rows,
    )  # fmt: skip
    arguments = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, partials)]
    with torch.cuda.device(device):
        product, add = _small_kernel(blocks, device, routing.tile_rows, x.dtype is torch.bfloat16, nested is not None)
        product(grid, 128 * blocks.groups + gemm4.COPYING, [weight, grouped, *arguments])
        if grid > 1:
            pieces = tile * routing.tile_rows // 4 // gemm4.ADDED  # blocks that add a tile
            add(
                (grid - 1) * pieces,
                gemm4.ADDED,
                [arguments[1], grouped, ctypes.c_uint32(columns), ctypes.c_uint32(grid)],
            )
    return out


LARGE_GROUPS = 2  # groups of four warps that execute wgmma
MOST_EXPERTS = 1024
# Average rows per expert. With fewer, `grouped_small` or Triton's transposed GEMM is faster; with more than LARGE_MOST,
# decoding the stack first is faster.
LARGE_FEWEST = 65
LARGE_FEWEST_TRANSPOSED = 33
LARGE_MOST = 320
UNNESTED = 1024  # scales that a block decodes


class Tile(NamedTuple):
    """Constants of `cuda/grouped_gemm4.cu`: 128 · `mt` channels by 8 · `nt` rows in `sections`; stages of the ring."""

    mt: int
    nt: int
    sections: int
    stages: int


class _Products(ctypes.Structure):
    """The struct `Products` of `cuda/grouped_gemm4.cu`."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("packed", "scales", "codebook", "x", "order", "offsets", "bias", "low", "factor", "out")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("top_k", "experts", "rows", "columns", "rank")),
    )


def tile_for(transposed: bool) -> Tile:
    """The fastest tile at 64 to 256 rows per expert."""
    return Tile(2, 16, 2, 6) if transposed else Tile(1, 16, 4, 6)


@remembered
def _large_kernel(tile: Tile, device: int, transposed: bool, bf16: bool) -> tuple[Kernel, Kernel]:
    """The GEMM, and the kernel that decodes nested scales."""
    constants = {name.upper(): value for name, value in tile._asdict().items()} | {
        "GROUPS": LARGE_GROUPS,
        "TRANSPOSED": int(transposed),
    }
    constants |= {"BF16": int(bf16), "ORIGIN": origin_of(device)}
    image = cubin("grouped_gemm4", device_at(device).capability, constants, [_Products])
    return Kernel(image, "grouped_gemm4"), Kernel(image, "unnest", 0)


def stack_obstacle(x: Tensor, stack: StackedWeight, dtype: torch.dtype) -> str | None:
    """Return why this stack is not supported whatever the number of rows, or None."""
    experts, rows, columns = stack.shape
    if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
        return "takes 4-bit weights in blocks of 64"
    if rows % 64 or columns % 64 or experts > MOST_EXPERTS or dtype is torch.float32:
        return f"needs N and K in multiples of 64, up to {MOST_EXPERTS} experts, and 16 bits"
    if not device_of(x).at_least(HOPPER):
        return NEEDS_HOPPER
    return gemm4.wgmma_capability(x)


def codes_obstacle(x: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> str | None:
    if not LARGE_FEWEST * stack.shape[0] <= slots <= LARGE_MOST * stack.shape[0]:
        return f"is faster for {LARGE_FEWEST} to {LARGE_MOST} rows an expert, on average"
    return stack_obstacle(x, stack, dtype)


@reference.multiplies_codes.kernel("cuda", unless=codes_obstacle)
def multiplies_codes(x: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> bool:
    return True


def large_obstacle(
    x: Tensor, stack: StackedWeight, routing: Routing, gather: bool = False, transposed: bool = False,
    low_rank: LowRank | None = None, bias: Tensor | None = None, alpha: float = 1.0,
) -> str | None:  # fmt: skip
    fewest = LARGE_FEWEST_TRANSPOSED if transposed else LARGE_FEWEST
    if routing.order.numel() < fewest * stack.shape[0]:
        return f"takes {fewest} rows an expert and more, on average"
    if alpha != 1.0 or (transposed and bias is not None):
        return "has no factor and, transposed, no bias"
    if low_rank is not None and low_rank.u.shape[1] % 4:
        return "needs the adapter's ranks in multiples of 4"
    if reason := stack_obstacle(x, stack, x.dtype):
        return reason
    tensors = [x, stack.parts["packed"], *(() if low_rank is None else (low_rank.u, low_rank.factor))]
    return "needs tensors at multiples of 16 bytes" if any(tensor.data_ptr() % 16 for tensor in tensors) else None


@reference.grouped_product.kernel("cuda", unless=large_obstacle, rank=-1)
def grouped_large(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    transposed: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    slots, width = reference.check_product(x, stack, routing, gather, transposed, low_rank, bias)
    x = x.contiguous()
    device = x.get_device()
    (experts, rows, columns) = stack.shape
    out = torch.empty(slots, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    format_: Any = stack.format
    tile = tile or tile_for(transposed)
    with torch.cuda.device(device):
        product, unnest = _large_kernel(tile, device, transposed, x.dtype is torch.bfloat16)
        scales, nested = stack.parts["absmax"], format_.nested_parts(stack.parts)
        if nested is not None:
            codes, scales = scales, torch.empty(scales.shape, dtype=torch.float32, device=x.device)
            pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, *nested, scales)]
            fours = ceil_div(scales.numel(), 4)
            unnest(ceil_div(fours * 4, UNNESTED), UNNESTED // 4, [*pointers, ctypes.c_uint32(fours)])
        u = factor = None
        if low_rank is not None:
            u, factor = low_rank.u.contiguous(), low_rank.factor.contiguous()
        products = _Products(
            *[
                None if tensor is None else tensor.data_ptr()
                for tensor in (
                    stack.parts["packed"], scales, codebook4(format_.quant_type, x.device), x, routing.order,
                    routing.offsets, bias, u, factor, out,
                )
            ],
            0.0 if low_rank is None else low_rank.scale, routing.top_k if gather else 0, experts, rows, columns,
            0 if u is None else u.shape[1],
        )  # fmt: skip
        tiles = (slots // (8 * tile.nt) + experts) * ceil_div(width, 64 * tile.mt * LARGE_GROUPS)
        product(min(multiprocessors_of(device), tiles), 128 * LARGE_GROUPS + gemm4.COPYING, [products])
    return out
