"""Linears of up to 64 rows with weights in bit planes, by the number of rows of x.

`gemv_bitplane`: one row, `row_planes.cu`. `gemm16_…`: up to 16 rows, `planes.cu`. `gemm64_…`: up to 64 rows with 4-bit
weights by Hopper's wgmma, `gemm_planes.cu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Op
from ...formats.bitplane import linear_bitplane
from ...formats.hqq import linear_hqq
from ...ops.decode import PackedLinear, packed_linears
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Kernel, cubin, gemm4, remembered
from .gemv4 import BATCH, Term, mma_obstacle

ROWS = 16  # rows of W per tile, at least one tile
COLUMNS = 512  # columns of K per iteration of a warp of `gemv_bitplane`, which must divide K
GEMM64_BITS = 4
FEWEST_HQQ = 17  # rows of x from which `gemm64_hqq` is faster than `gemm16_hqq`
HQQ_BITS = (2, 3, 4, 8)
NEEDS_BF16 = "needs bf16, as fp16 does not hold every scale"


class Planes(ctypes.Structure):
    """The struct of this name in `cuda/planes.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "zeros", "codebook")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    )


class GemvBlocks(NamedTuple):
    """Constants of `cuda/mma_gemv.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


def gemv_blocks(bits: int, rows: int, multiprocessors: int) -> GemvBlocks:
    """One group per tile of a multiprocessor, at most 8, so that all tiles run concurrently.

    Two tiles at a time share loads of x: measured faster at 4 bits, slower at 2 and 3.
    """
    rt = 2 if bits == 4 else 1
    groups = min(power_of_2(ceil_div(ceil_div(rows, rt * ROWS), multiprocessors)), 8)
    return GemvBlocks(rt, groups, 16 // groups)


@remembered
def _gemv_kernel(blocks: GemvBlocks, device: int, bf16: bool, bits: int) -> Kernel:
    constants = dict(zip(("RT", "WR", "WK"), blocks, strict=True))
    constants |= {"BITS": bits, "BATCH": 1, "BF16": int(bf16), "ORIGIN": origin_of(device)}
    image = cubin("row_planes", device_at(device).capability, constants, [Planes])
    return Kernel(image, "row_planes")


def gemv_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    if x.shape[0] != 1 or rows < ROWS or x.shape[1] % COLUMNS:
        return "takes one row, N from 16 and K in multiples of 512"
    return mma_obstacle(x, packed, scales)


@linear_bitplane.kernel("cuda", unless=gemv_obstacle, rank=1)
def gemv_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: GemvBlocks | None = None,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    device = x.get_device()
    bits = codebook.numel().bit_length() - 1
    blocks = blocks or gemv_blocks(bits, rows, multiprocessors_of(device))
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, scales, codebook)], rows, x.shape[1])
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out, factor)]
    with torch.cuda.device(device):
        kernel = _gemv_kernel(blocks, device, x.dtype is torch.bfloat16, bits)
        kernel(min(ceil_div(rows, ROWS), multiprocessors_of(device)), 32 * blocks.wr * blocks.wk, [weight, *pointers])
    return out


class Gemm16Blocks(NamedTuple):
    """Constants of `cuda/split_k.cuh`: 16 · `rt` rows a tile, `wr` groups of `wk` warps, `stages` of the ring."""

    rt: int
    wr: int
    wk: int
    stages: int


def gemm16_blocks(bits: int, rows: int, batch: int, multiprocessors: int) -> Gemm16Blocks:
    """One group per tile of a multiprocessor, at most 8, so that all tiles run concurrently.

    Two ring buffer stages are enough; more would reduce the L1 cache, from which x is read.
    """
    warps = 16 if batch <= 8 and bits < 8 else 8
    rt = 1 if batch <= 8 or bits == 8 or rows < 32 else 2
    groups = min(power_of_2(ceil_div(ceil_div(rows, 16 * rt), multiprocessors)), 8 // rt)
    return Gemm16Blocks(rt, groups, warps // groups, 2)


@remembered
def _gemm16_kernel(blocks: Gemm16Blocks, device: int, batch: int, bf16: bool, bits: int, group: int) -> Kernel:
    """Compile and load for `batch` rows of x, a power of two."""
    constants = dict(zip(("RT", "WR", "WK", "STAGES"), blocks, strict=True))
    constants |= {"BITS": bits, "GROUP": group, "NT": ceil_div(batch, 8), "BF16": int(bf16)}
    image = cubin("planes", device_at(device).capability, constants | {"ORIGIN": origin_of(device)}, [Planes])
    return Kernel(image, "planes", image.shared_for(batch))


def gemm16(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codebook: Tensor, bits: int, group: int,
    rows: int, bias: Tensor | None, blocks: Gemm16Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_bitplane`; with a `group`, `linear_hqq`."""
    x = x.contiguous()
    device = x.get_device()
    batch = x.shape[0]
    blocks = blocks or gemm16_blocks(bits, rows, batch, multiprocessors_of(device))
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, codebook)], rows, x.shape[1])
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out, factor)]
    with torch.cuda.device(device):
        kernel = _gemm16_kernel(blocks, device, power_of_2(batch), x.dtype is torch.bfloat16, bits, group)
        grid = min(ceil_div(rows, 16 * blocks.rt), multiprocessors_of(device))
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *pointers, ctypes.c_uint32(batch)])
    return out


def _gemm16_obstacle(x: Tensor, rows: int, *of_weight: Tensor) -> str | None:
    if not 1 <= x.shape[0] <= BATCH or rows < ROWS:
        return "takes 1 to 16 rows, and N from 16"
    return mma_obstacle(x, *of_weight)


def gemm16_bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    return _gemm16_obstacle(x, rows, packed, scales)


def hqq_obstacle(scales: Tensor, zeros: Tensor, bits: int) -> str | None:
    """Return why CUDA's kernels of `linear_hqq` refuse a weight, whatever its shape, or None."""
    if bits not in HQQ_BITS:
        return "takes 2, 3, 4 and 8 bits"
    if scales.dtype is not torch.bfloat16 or zeros.dtype is not torch.float16:
        return "needs bf16 scales and fp16 zeros"
    return None


def gemm16_hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, *_: Any
) -> str | None:
    if x.dtype is not torch.bfloat16:
        return NEEDS_BF16
    return hqq_obstacle(scales, zeros, bits) or _gemm16_obstacle(x, rows, packed, scales, zeros)


@linear_bitplane.kernel("cuda", unless=gemm16_bitplane_obstacle, rank=3)
def gemm16_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    bits = codebook.numel().bit_length() - 1
    return gemm16(x, packed, scales, scales, factor, codebook, bits, 0, rows, bias)


@linear_hqq.kernel("cuda", unless=gemm16_hqq_obstacle, rank=2)
def gemm16_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    return gemm16(x, packed, scales, zeros, scales, scales, bits, group, rows, bias)


def gemm64(x: Tensor, products: Sequence[gemm4.Product], group: int, blocks: gemm4.Blocks | None) -> list[Tensor]:
    """`linear_bitplane`; with a `group`, `linear_hqq`."""
    return gemm4.launch_wgmma("gemm_planes", products, x, blocks, BITS=GEMM64_BITS, GROUP=group)


def bitplane_product(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> gemm4.Product:
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, scales, codebook)], rows, x.shape[1])
    return gemm4.Product(weight, rows, bias, factor)


def hqq_product(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> gemm4.Product:
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, scales)], rows, x.shape[1])
    return gemm4.Product(weight, rows, bias)


def gemm64_bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, *_: Any
) -> str | None:
    if x.shape[0] < gemm4.FEWEST or codebook.numel() != 2**GEMM64_BITS:
        return "takes 9 to 64 rows and 4 bits"
    return gemm4.wgmma_obstacle(x, packed, scales)


def gemm64_hqq_obstacle(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, *_: Any) -> str | None:
    if x.shape[0] < FEWEST_HQQ or bits != GEMM64_BITS:
        return "takes 17 to 64 rows and 4 bits"
    if x.dtype is not torch.bfloat16:
        return NEEDS_BF16
    return hqq_obstacle(scales, zeros, bits) or gemm4.wgmma_obstacle(x, packed, scales, zeros)


@linear_bitplane.kernel("cuda", unless=gemm64_bitplane_obstacle, rank=2)
def gemm64_bitplane(x: Tensor, *arguments: Any, blocks: gemm4.Blocks | None = None) -> Tensor:
    return gemm64(x, [bitplane_product(x, *arguments)], 0, blocks)[0]


@linear_hqq.kernel("cuda", unless=gemm64_hqq_obstacle, rank=1)
def gemm64_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None,
    blocks: gemm4.Blocks | None = None,
) -> Tensor:  # fmt: skip
    return gemm64(x, [hqq_product(x, packed, scales, zeros, bits, group, rows, bias)], group, blocks)[0]


GEMM64: dict[Op, tuple[Callable[..., str | None], Callable[..., gemm4.Product]]] = {
    linear_bitplane: (gemm64_bitplane_obstacle, bitplane_product),
    linear_hqq: (gemm64_hqq_obstacle, hqq_product),
}


def _group(linear: PackedLinear) -> int:
    return linear.product.arguments[4] if linear.product.op is linear_hqq else 0


def gemm64_several_obstacle(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[Term]) -> str | None:
    products = [linear.product for linear in linears]
    if len(products) > gemm4.PRODUCTS or any(p.op not in GEMM64 or p.order is not None for p in products):
        return f"takes 1 to {gemm4.PRODUCTS} weights in bit planes"
    if len({(linear.product.op, _group(linear)) for linear in linears}) > 1:
        return "needs weights of one format"
    obstacle, _ = GEMM64[products[0].op]
    refusals = (reason for product in products if (reason := obstacle(x, *product.arguments)))
    return gemm4.terms_obstacle(terms) or next(refusals, None)


@packed_linears.kernel("cuda", unless=gemm64_several_obstacle, rank=2)
def gemm64_several(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[Term]) -> list[Tensor]:
    _, product_of = GEMM64[linears[0].product.op]
    products = [
        product_of(x, *linear.product.arguments, linear.bias)._replace(term=term)
        for linear, term in zip(linears, terms, strict=True)
    ]
    return gemm64(x, products, _group(linears[0]), None)
