"""`cuda/gemm.cuh`: GEMM of up to 64 rows with weights of 4 bits, decoded in registers, by Hopper's wgmma."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import linear_blockwise4
from ...ops.decode import PackedLinear, packed_linears
from ..device import device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemv4, remembered
from .gemv4 import BLOCKSIZE, Nested, mma_obstacle, weight_of
from .gemv4_row import shares, weights_obstacle

FEWEST, BATCH = 9, 64  # rows of x
CAPABILITY = 9  # only compute capability 9.x has wgmma
STEP = 256  # columns of K in a unit of work
COPYING, ADDED = 128, 256  # threads of a block that copy; threads of a block of `add`
PARTS = 16  # most parts of a tile, approximately
PRODUCTS = 3  # most products of a launch


class Term(ctypes.Structure):
    """The struct `Term` of `cuda/partials.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "ub"),
        *((name, ctypes.c_uint32) for name in ("apart", "rank")),
    )


class Sum(ctypes.Structure):
    """The struct `Sum` of `cuda/partials.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partials", "bias", "out", "factor")),
        ("term", Term),
        *((name, ctypes.c_uint32) for name in ("rows", "blocks", "begin", "unused")),
    )


class Sums(ctypes.Structure):
    """The struct `Sums` of `cuda/partials.cuh`."""

    _fields_ = (("parts", Sum * PRODUCTS),)


@functools.cache
def parts_of(weight: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """The struct `Parts<W>` of `cuda/gemm.cuh` for weights of this struct."""
    numbers = (("begin", ctypes.c_uint32), ("blocks", ctypes.c_uint32))
    fields = {"_fields_": (("w", weight), ("partials", ctypes.c_void_p), *numbers)}
    part: type[ctypes.Structure] = type("Part", (ctypes.Structure,), fields)
    return type("Parts", (ctypes.Structure,), {"_fields_": (("parts", part * PRODUCTS),)})


class Blocks(NamedTuple):
    """Constants of `cuda/gemm.cuh`: tiles of 64 · `groups` rows, `stages` of the ring buffer."""

    groups: int
    stages: int


def tiles_of(batch: int) -> int:
    """Tiles of 8 rows of x, rounded up to an even number."""
    return 2 * ceil_div(batch, 16)


def blocks_for(tiles: int) -> Blocks:
    """The largest tile; more stages would reduce the L1 cache, through which x is read."""
    return Blocks(4, 4 if tiles <= 4 else 3)


def grid_for(tiles: int, steps: int, multiprocessors: int) -> int:
    """The fewest blocks that finish as early as one per multiprocessor, with at most `PARTS` per tile."""
    blocks = min(multiprocessors, tiles * min(steps, PARTS))
    return ceil_div(tiles * steps, ceil_div(tiles * steps, blocks))


@remembered
def _kernel(
    name: str, blocks: Blocks, device: int, tiles: int, bf16: bool, struct: type[ctypes.Structure], constants: tuple
) -> tuple[Kernel, Kernel]:
    """The GEMM, and the kernel that adds the tiles' parts."""
    values = {"GROUPS": blocks.groups, "STAGES": blocks.stages, "NT": tiles, "BF16": int(bf16), **dict(constants)}
    image = cubin(name, device_at(device).capability, values | {"ORIGIN": origin_of(device)}, [struct, Sums])
    return Kernel(image, name), Kernel(image, "add", 0)


def wgmma_obstacle(x: Tensor, *of_weight: Tensor) -> str | None:
    """Return why these kernels refuse x and the weight's tensors whatever the block size, or None."""
    if x.shape[0] > BATCH:
        return "takes up to 64 rows"
    return mma_obstacle(x, *of_weight) or wgmma_capability(x)


def wgmma_capability(x: Tensor) -> str | None:
    """Return a reason if x's device has no wgmma, else None."""
    return "needs wgmma, of compute capability 9.x alone" if device_of(x).capability[0] != CAPABILITY else None


def adds(term: gemv4.Term) -> bool:
    """Return whether the kernels can add this term: groups of eight 16-bit numbers, read 16 bytes at a time."""
    return term is None or (
        term[1].is_contiguous()
        and (term[0].stride(1), term[0].stride(0) % 8, term[0].shape[1] % 8) == (1, 0, 0)
        and all(tensor.data_ptr() % 16 == 0 for tensor in term)
    )


def term_of(term: gemv4.Term) -> Term:
    """An adapter's term that `adds` accepts, as `add`'s parameter."""
    return Term() if term is None else Term(*[t.data_ptr() for t in term], term[0].stride(0), term[0].shape[1])


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


class Product(NamedTuple):
    """`factor` · x·Wᵀ + b + u·Bᵀ, for W [rows, K] as the kernel's struct; `adds` accepts the term."""

    weight: ctypes.Structure
    rows: int
    bias: Tensor | None
    factor: Tensor | None = None
    term: gemv4.Term = None


def sum_of(product: Product, partials: Tensor, out: Tensor, blocks: int, begin: int) -> Sum:
    """A product's parameter of `add`, for partial sums that `blocks` blocks write."""
    tensors = (partials, product.bias, out, product.factor)
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return Sum(*addresses, term_of(product.term), product.rows, blocks, begin)


def sums_of(sums: Sequence[Sum], blocks: int) -> Sums:
    """The parameter of `add` in `blocks` blocks."""
    return Sums((Sum * PRODUCTS)(*sums, *(Sum(begin=blocks) for _ in range(PRODUCTS - len(sums)))))


def launch(
    kernels: tuple[Kernel, Kernel], products: Sequence[Product], x: Tensor, tile: int, threads: int
) -> list[Tensor]:
    """The results [M, rows] of up to `PRODUCTS` products: by a kernel with tiles of `tile` rows, and by `add`."""
    device, (batch, columns) = x.get_device(), x.shape
    tiles = tiles_of(batch)
    cuts = [ceil_div(product.rows, tile) for product in products]
    steps = columns // STEP
    steps_per_block = shares([cut * steps for cut in cuts], multiprocessors_of(device))
    grids = [grid_for(cut, steps, share) for cut, share in zip(cuts, steps_per_block, strict=True)]
    additions = [cut * tile * 2 * tiles // ADDED for cut in cuts]  # blocks of `add`
    entries = [grid + cut for grid, cut in zip(grids, cuts, strict=True)]
    partials = torch.empty(sum(entries), tile * 8 * tiles, dtype=torch.float32, device=x.device).split(entries)
    outs = [torch.empty(batch, product.rows, dtype=x.dtype, device=x.device) for product in products]
    parts, sums = parts_of(type(products[0].weight))(), []
    for part in parts.parts:
        part.begin = sum(grids)
    for at, product in enumerate(products):
        part = parts.parts[at]
        part.w = product.weight
        part.partials = partials[at].data_ptr()
        part.begin = sum(grids[:at])
        part.blocks = grids[at]
        sums.append(sum_of(product, partials[at], outs[at], grids[at], sum(additions[:at])))
    rows = ctypes.c_uint32(batch)
    kernel, add = kernels
    with torch.cuda.device(device):
        kernel(sum(grids), threads, [parts, *pointers(x), rows])
        add(sum(additions), ADDED, [sums_of(sums, sum(additions)), ctypes.c_uint32(columns), rows])
    return outs


def launch_wgmma(
    name: str, products: Sequence[Product], x: Tensor, blocks: Blocks | None = None, **constants: int
) -> list[Tensor]:
    """The results of up to `PRODUCTS` products by the kernel `name`, [M, rows] each."""
    device, tiles = x.get_device(), tiles_of(x.shape[0])
    blocks = blocks or blocks_for(tiles)
    parts, bf16 = parts_of(type(products[0].weight)), x.dtype is torch.bfloat16
    with torch.cuda.device(device):
        kernels = _kernel(name, blocks, device, tiles, bf16, parts, tuple(constants.items()))
    return launch(kernels, products, x.contiguous(), 64 * blocks.groups, 128 * blocks.groups + COPYING)


def obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    *_: Any,
) -> str | None:  # fmt: skip
    if x.shape[0] < FEWEST or blocksize != BLOCKSIZE:
        return "takes 9 to 64 rows and blocks of 64"
    return wgmma_obstacle(x, packed, absmax)


@linear_blockwise4.kernel("cuda", unless=obstacle, rank=2)
def gemm(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    product = Product(weight_of(x, packed, absmax, nested, quant_type, rows), rows, bias)
    return launch_wgmma("gemm4", [product], x, blocks, NESTED=int(nested is not None))[0]


def terms_obstacle(terms: Sequence[gemv4.Term]) -> str | None:
    fits = all(map(adds, terms))
    return None if fits else "needs adapters' ranks in multiples of 8, at multiples of 16 bytes"


def several_obstacle(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[gemv4.Term]) -> str | None:
    refusals = (reason for linear in linears if (reason := obstacle(x, *linear.product.arguments)))
    return weights_obstacle(linears) or terms_obstacle(terms) or next(refusals, None)


@packed_linears.kernel("cuda", unless=several_obstacle, rank=1)
def several(
    x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[gemv4.Term], blocks: Blocks | None = None
) -> list[Tensor]:
    products = []
    for linear, term in zip(linears, terms, strict=True):
        packed, absmax, nested, _, quant_type, rows = linear.product.arguments
        weight = weight_of(x, packed, absmax, nested, quant_type, rows)
        products.append(Product(weight, rows, linear.bias, term=term))
    return launch_wgmma("gemm4", products, x, blocks, NESTED=int(nested is not None))
