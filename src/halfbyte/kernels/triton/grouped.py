"""Triton: grouped GEMMs of experts, with packed weights of every format decoded in the main loop (`decoders`).

A program computes one tile of an expert's rows and one block of output columns. `route` builds the table of tiles on
the device. The table has as many entries as there could be tiles; programs of unused entries return at once. Rows of x
are gathered as they are loaded; the accumulators start with the low-rank term. Values are scaled and rounded to x's
dtype as in dequantization, so packed and dequantized weights give the same GEMM.

A weight with K contiguous is read as [block of columns, K step] in forward, and as [K step, block of columns] by the
transposed GEMM of backward: the same words with the same decoding, without a transposed copy.

Measured on an H200 (torch 2.11, Triton 3.6) with Qwen3-30B-A3B's shapes, 128 experts, NF4, in µs. `F.grouped_mm` (gm)
multiplies 16-bit weights by rows that are already gathered; gathering takes another 132 µs at 512 rows per expert.
Decoding a stack takes 256 (gate and up) and 132 (down).

    rows per  gate and up            down                   dX of gate and up
    expert    gm    packed  plain    gm    packed  plain    gm    packed  plain
    1         202   156              119   88               206   157
    16        270   264              159   128              278   230
    32        266   299              157   153              277   282
    64        269   428     250      156   214     138      272   375     256
    128       352   600     379      197   298     216      357   560     406
    256       417   957     483      256   477     284      432   869     519
    512       689   1,763   764      410   852     442      711   1,522   809

With packed weights an iteration takes 3,300 clocks whatever the tile, the warps and W's side; no sweep removed this
latency. So from `ops.experts.DECODED_ROWS` rows on a stack is decoded first.

Other formats, gate and up of 8 and 256 tokens (8 choices each), forward / dX; NF4 takes 96 / 90 and 253 / 222:

    tokens  kbit3      hqq4       int4      nvfp4      fp8       int8
    8       133 / 123  136 / 110  84 / 71   99 / 91    74 / 69   74 / 72
    256     307 / 309  312 / 305  189 / 193 240 / 222  182 / 180 184 / 190
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...dispatch import Unavailable
from ...ops import experts as reference
from ...ops.experts import LowRank, Routing, StackedWeight
from ..device import device_of
from ..tiling import ceil_div, power_of_2
from . import decoders
from .decoders import Options, Packed, shuffles
from .launch import Launcher

BLACKWELL = (10, 0)
KIB = 1024
NARROW = 64  # most columns of a GEMM with an adapter's factor
STEP = 64  # depth per iteration, a block of the usual 4-bit formats
# For tiles of up to this many rows, nested scales are decoded in the main loop: a separate pass would also read scales
# of experts without rows. With larger tiles the loop would decode each scale once per tile.
NESTED_ROWS = 16
UNNESTED = 1024  # scales that a program decodes


class Tile(NamedTuple):
    """Tile of a program: output columns, depth per iteration, warps, stages, and which operand W is."""

    columns: int
    step: int
    warps: int
    stages: int
    left: bool  # W is the left operand: for tiles with fewer rows than a tensor core's instruction


# By rows of a tile: the shared memory in KiB that a block needs for 16-bit values, and the tile. The first entry of
# each row is the best of sweeps on an H200.
PACKED: dict[int, tuple[tuple[int, Tile], ...]] = {
    16: ((26, Tile(128, STEP, 4, 3, True)),),
    32: ((32, Tile(128, STEP, 4, 3, True)),),
    64: ((50, Tile(128, STEP, 8, 3, True)), (30, Tile(64, STEP, 4, 2, True))),
    128: ((76, Tile(128, STEP, 8, 3, True)), (60, Tile(128, STEP, 8, 2, True)), (46, Tile(64, STEP, 4, 2, True))),
}
PLAIN: dict[int, tuple[tuple[int, Tile], ...]] = {
    16: ((62, Tile(128, STEP, 4, 3, True)), (30, Tile(64, 32, 4, 2, True))),
    32: ((68, Tile(128, STEP, 4, 3, True)), (50, Tile(128, STEP, 4, 2, True)), (30, Tile(64, 32, 4, 2, True))),
    64: ((82, Tile(128, STEP, 4, 3, False)), (60, Tile(128, STEP, 4, 2, False)), (30, Tile(64, 32, 4, 2, False))),
    128: ((206, Tile(256, STEP, 8, 4, False)), (158, Tile(256, STEP, 8, 3, False)), (106, Tile(128, STEP, 8, 3, False)),
          (62, Tile(128, 32, 8, 3, False)), (30, Tile(64, 32, 4, 2, False))),
}  # fmt: skip


@triton.jit
def _tile(
    weight, expert, row, rows, start, columns, words, like_ptr, WIDTH: tl.constexpr, DECODER: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """Load [rows, WIDTH] of an expert's matrix, columns from `start`, decoded unless DECODER is None."""
    if DECODER is None:
        row = tl.minimum(row, rows - 1)  # rows after the end repeat the last one
        col = start + tl.arange(0, WIDTH)
        offsets = row.to(tl.int64)[:, None] * columns + col[None, :]
        base = weight[0] + expert.to(tl.int64) * rows * columns
        values = tl.load(base + offsets, mask=(col < columns)[None, :], other=0.0)
    else:
        values = decoders.values(weight, expert, row, rows, start, words, like_ptr, WIDTH // 8, DECODER, OPTIONS)
    return values


@triton.jit
def _finish(
    acc, bias_ptr, out_ptr, expert, row, live, o, width, alpha, BIAS: tl.constexpr, LEFT: tl.constexpr
):  # fmt: skip
    """Add the bias, scale, and store."""
    if LEFT:
        acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + expert * width + o, mask=o < width, other=0.0).to(tl.float32)[None, :]
    offsets = row.to(tl.int64)[:, None] * width + o[None, :]
    mask = live[:, None] & (o < width)[None, :]
    tl.store(out_ptr + offsets, (acc * alpha).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dot(x, w, acc, W_ROWS: tl.constexpr, LEFT: tl.constexpr):
    """acc + x·w for x [rows, depth] and w, which is [columns, depth] with W_ROWS, else [depth, columns]."""
    if not W_ROWS:
        w = tl.trans(w)
    if LEFT:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def _low_rank(
    low_ptr, factor_ptr, expert, row, live, o, width, scale,
    TRANSPOSED: tl.constexpr, RANK: tl.constexpr, PADDED: tl.constexpr, LEFT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Initial accumulators: scale·u·F of the tile, or zeros without an adapter."""
    if LEFT:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if RANK > 0:
        r = tl.arange(0, PADDED)
        if TRANSPOSED:
            inside = r[None, :] * width + o[:, None]
        else:
            inside = o[:, None] * RANK + r[None, :]
        in_factor = (o < width)[:, None] & (r < RANK)[None, :]
        factor = tl.load(factor_ptr + expert.to(tl.int64) * width * RANK + inside, mask=in_factor, other=0.0)
        read = live[:, None] & (r < RANK)[None, :]
        low = tl.load(low_ptr + row.to(tl.int64)[:, None] * RANK + r[None, :], mask=read, other=0.0)
        acc = _dot(low, factor, acc, True, LEFT) * scale
    return acc


@triton.jit
def _grouped(
    x_ptr, order_ptr, tile_ptr, offset_ptr, codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr, low_ptr,
    lora_ptr, bias_ptr, out_ptr,
    rows, columns, words, experts, scale, alpha,
    TOP_K: tl.constexpr, TRANSPOSED: tl.constexpr, DECODER: tl.constexpr, OPTIONS: tl.constexpr, RANK: tl.constexpr,
    PADDED: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, LEFT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if TRANSPOSED:
        width, depth = columns, rows
    else:
        width, depth = rows, columns
    blocks = tl.cdiv(width, COLUMNS)
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    expert = tl.load(tile_ptr + 2 * tile)
    if expert < experts:
        end = tl.load(offset_ptr + expert + 1)
        row = tl.load(tile_ptr + 2 * tile + 1) + tl.arange(0, ROWS)
        source = tl.minimum(row, end - 1)
        if TOP_K > 0:
            source = tl.load(order_ptr + source) // TOP_K
        o = block * COLUMNS + tl.arange(0, COLUMNS)
        acc = _low_rank(
            low_ptr, lora_ptr, expert, row, row < end, o, width, scale, TRANSPOSED, RANK, PADDED, LEFT, ROWS, COLUMNS
        )
        x_row = x_ptr + source.to(tl.int64)[:, None] * depth
        weight = codes_ptr, scale_ptr, zero_ptr, factor_ptr, index_ptr, table_ptr
        if DECODER is not None:
            weight = decoders.opened(weight, expert, OPTIONS)
        for step in tl.range(0, tl.cdiv(depth, STEP), num_stages=STAGES):
            d = step * STEP + tl.arange(0, STEP)
            if EVEN:
                x = tl.load(x_row + d[None, :])
            else:
                x = tl.load(x_row + d[None, :], mask=(d < depth)[None, :], other=0.0)
            if TRANSPOSED:
                w = _tile(weight, expert, d, rows, block * COLUMNS, columns, words, x_ptr, COLUMNS, DECODER, OPTIONS)
            else:
                w = _tile(weight, expert, o, rows, step * STEP, columns, words, x_ptr, STEP, DECODER, OPTIONS)
            acc = _dot(x, w, acc, not TRANSPOSED, LEFT)
        _finish(acc, bias_ptr, out_ptr, expert, row, row < end, o, width, alpha, BIAS, LEFT)


@triton.jit
def _unnest(
    absmax_ptr, second_ptr, code_ptr, shift_ptr, out_ptr, blocks, NESTED_BLOCK: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = block < blocks
    q = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
    second = tl.load(second_ptr + block // NESTED_BLOCK, mask=mask, other=0.0)
    tl.store(out_ptr + block, tl.load(code_ptr + q) * second + tl.load(shift_ptr), mask=mask)


_launcher, _unnest_launcher = Launcher(_grouped), Launcher(_unnest, enable_fp_fusion=False)


def tile_of(x: Tensor, packed: bool, routing: Routing, width: int, transposed: bool) -> Tile:
    """The first tile of its row that fits in the device's shared memory.

    Large transposed tiles have W as the right operand, which is 13% faster.

    Raises:
        Unavailable: no tile fits.
    """
    if width <= NARROW:  # an adapter's rank
        stages = 3 if x.element_size() == 2 else 2
        return Tile(max(power_of_2(width), 16), STEP, 4, stages, False)
    shared, row = device_of(x).shared_bytes, (PACKED if packed else PLAIN)[routing.tile_rows]
    scale = x.element_size() // 2
    tile = next((tile for needed, tile in row if needed * scale * KIB <= shared), None)
    if tile is None:
        raise Unavailable(f"there is no tile of {routing.tile_rows} rows for {x.dtype}")
    return tile._replace(left=tile.left and not (transposed and routing.tile_rows == 128))


def obstacle(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    transposed: bool = False,
    *_: Any,
    **__: Any,
) -> str | None:
    if not routing.tile_rows:
        return "needs the table of tiles"
    if x.dtype is torch.float32 and device_of(x).at_least(BLACKWELL):
        return "takes 16 bits there: of fp32, Triton 3.6's compiler aborts the process"
    return None


def _packed(stack: StackedWeight, dtype: torch.dtype, unnest: bool) -> Packed:
    """The stack as the kernel takes it; with `unnest`, nested scales are decoded first."""
    if decoders.stack_obstacle(stack) is not None:
        return Packed(None, (stack.values(dtype).contiguous(),) * 6, Options(), 0)
    packed = decoders.packed_stack(stack)
    if not (unnest and packed.options.nested):
        return packed
    words, absmax, *nested, table = packed.tensors
    scales = torch.empty(absmax.shape, dtype=torch.float32, device=absmax.device)
    programs, constants = ceil_div(scales.numel(), UNNESTED), (packed.options.nested, UNNESTED)
    _unnest_launcher(programs, (absmax, *nested, scales), (scales.numel(),), constants, warps=4)
    return packed._replace(tensors=(words, *(scales,) * 4, table), options=packed.options._replace(nested=0))


@reference.grouped_product.kernel("cuda", "xpu", unless=obstacle, rank=1)
def grouped_product(
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
    experts, rows, columns = stack.shape
    x, out = x.contiguous(), torch.empty(slots, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    packed = _packed(stack, x.dtype, routing.tile_rows > NESTED_ROWS)
    tile = tile or tile_of(x, packed.decoder is not None, routing, width, transposed)
    tile = tile._replace(stages=1) if packed.options.by_column else tile
    u, factor, scale = low_rank if low_rank is not None else (x, x, 1.0)
    rank = u.shape[1] if low_rank is not None else 0
    _launcher(
        routing.tiles.shape[0] * ceil_div(width, tile.columns),
        (x, routing.order, routing.tiles, routing.offsets, *packed.tensors, u, factor, x if bias is None else bias,
         out),
        (rows, columns, packed.words, experts, scale, alpha),
        (routing.top_k if gather else 0, transposed, packed.decoder, packed.options._replace(shuffle=shuffles(x)),
         rank, max(power_of_2(rank), 16) if rank else 0, bias is not None, x.shape[1] % tile.step == 0, tile.left,
         routing.tile_rows, tile.columns, tile.step, tile.stages),
        warps=tile.warps,
    )  # fmt: skip
    return out
