"""`cuda/grouped_gemm4.cu`: products of a mixture's experts with many rows, 4-bit weights decoded in registers.

Measured on an H200 at Qwen3-30B-A3B's shape, 128 experts, NF4, in µs, nested scales decoded first; beside it
`F.grouped_mm` (gm) on 16-bit weights and gathered rows. z is grad · W of the down product.

    rows an   gate and up   down          dX of gate and up   z
    expert    gm    codes   gm    codes   gm    codes         gm    codes
    64        268   277     158   145     278   260           142   143
    128       373   429     207   216     373   385           190   226
    256       440   692     260   337     451   607           231   341
    512       716   1,225   413   588     727   1,070         368   584

Decoding the stacks first takes 254 and 130 more. With parts of the kernel left out, gate and up at 512 rows take 1,188
whole, 808 without decoding, 710 without products: copies of x by cp.async (3.8 TB/s from the second-level cache) seem
to bound it from 256 rows on, with decoding's use of shared memory beside them. Tiles of 128 channels by 256 rows take
as long (1,249), four groups of 64 rows longer.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import Blockwise4
from ...ops import experts as reference
from ...ops.codebooks import codebook4
from ...ops.experts import LowRank, Routing, StackedWeight
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered
from .gemm4 import COPYING, wgmma_capability
from .gemv4 import BLOCKSIZE

GROUPS = 2  # of four warps, that multiply
MOST = 1024  # experts
# Rows an expert, on average: with fewer `grouped4` is faster, or Triton's turned product; with more than MANY decoding
# the stack first is.
FEWEST, FEWEST_TURNED, MANY = 65, 33, 320
UNNESTED = 1024  # scales that a block decodes


class Tile(NamedTuple):
    """Constants of `cuda/grouped_gemm4.cu`: 128 · `mt` channels by 8 · `nt` rows, in `parts`; `stages` of the ring."""

    mt: int
    nt: int
    parts: int
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


def tile_for(turned: bool) -> Tile:
    """What was fastest at 64 to 256 rows an expert."""
    return Tile(2, 16, 2, 6) if turned else Tile(1, 16, 4, 6)


@remembered
def _kernel(tile: Tile, device: int, turned: bool, bf16: bool) -> tuple[Kernel, Kernel]:
    """What multiplies, and what decodes nested scales."""
    constants = {name.upper(): value for name, value in tile._asdict().items()} | {
        "GROUPS": GROUPS,
        "TURNED": int(turned),
    }
    constants |= {"BF16": int(bf16), "ORIGIN": origin_of(device)}
    image = cubin("grouped_gemm4", device_at(device).capability, constants, [_Products])
    return Kernel(image, "grouped_gemm4"), Kernel(image, "unnest", 0)


def stack_obstacle(part: Tensor, stack: StackedWeight, dtype: torch.dtype) -> str | None:
    """Why this stack is not multiplied here, however many rows there are; None: it is."""
    experts, rows, columns = stack.shape
    if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
        return "takes 4-bit weights in blocks of 64"
    if rows % 64 or columns % 64 or experts > MOST or dtype is torch.float32:
        return f"needs N and K in multiples of 64, up to {MOST} experts, and 16 bits"
    if not device_of(part).at_least(HOPPER):
        return NEEDS_HOPPER
    return wgmma_capability(part)


def codes_obstacle(part: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> str | None:
    if not FEWEST * stack.shape[0] <= slots <= MANY * stack.shape[0]:
        return f"is faster for {FEWEST} to {MANY} rows an expert, on average"
    return stack_obstacle(part, stack, dtype)


@reference.multiplies_codes.kernel("cuda", unless=codes_obstacle)
def multiplies_codes(part: Tensor, stack: StackedWeight, slots: int, dtype: torch.dtype) -> bool:
    return True


def obstacle(
    x: Tensor, stack: StackedWeight, routing: Routing, gather: bool = False, turned: bool = False,
    low_rank: LowRank | None = None, bias: Tensor | None = None, alpha: float = 1.0,
) -> str | None:  # fmt: skip
    fewest = FEWEST_TURNED if turned else FEWEST
    if routing.order.numel() < fewest * stack.shape[0]:
        return f"takes {fewest} rows an expert and more, on average"
    if alpha != 1.0 or (turned and bias is not None):
        return "has no factor and, turned, no bias"
    if low_rank is not None and low_rank.u.shape[1] % 4:
        return "needs the adapter's ranks in multiples of 4"
    if reason := stack_obstacle(x, stack, x.dtype):
        return reason
    given = [x, stack.parts["packed"], *(() if low_rank is None else (low_rank.u, low_rank.factor))]
    return "needs tensors at multiples of 16 bytes" if any(tensor.data_ptr() % 16 for tensor in given) else None


@reference.grouped_product.kernel("cuda", unless=obstacle, rank=-1)
def grouped_product(
    x: Tensor,
    stack: StackedWeight,
    routing: Routing,
    gather: bool = False,
    turned: bool = False,
    low_rank: LowRank | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    slots, width = reference.check_product(x, stack, routing, gather, turned, low_rank, bias)
    x, device, (experts, rows, columns) = x.contiguous(), x.get_device(), stack.shape
    out = torch.empty(slots, width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    format_: Any = stack.format
    tile = tile or tile_for(turned)
    with torch.cuda.device(device):
        product, unnest = _kernel(tile, device, turned, x.dtype is torch.bfloat16)
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
        tiles = (slots // (8 * tile.nt) + experts) * ceil_div(width, 64 * tile.mt * GROUPS)
        product(min(multiprocessors_of(device), tiles), 128 * GROUPS + COPYING, [products])
    return out
