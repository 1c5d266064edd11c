"""`cuda/gemm.cuh`: GEMM of up to 64 rows with weights of 4 bits, decoded in registers, by Hopper's wgmma."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.blockwise4 import linear_blockwise4
from ..device import device_at, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemv4, remembered
from .gemv4 import BLOCKSIZE, Nested, mma_obstacle, weight_of

FEWEST, BATCH = 9, 64  # rows of x
CAPABILITY = 9  # only compute capability 9.x has wgmma
STEP = 256  # columns of K in a unit of work
COPYING, ADDED = 128, 256  # threads of a block that copy; threads of a block of `add`
PARTS = 16  # most parts of a tile, approximately


class Term(ctypes.Structure):
    """The struct `Term` of `cuda/partials.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in "ub"),
        *((name, ctypes.c_uint32) for name in ("apart", "rank")),
    )


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
    image = cubin(name, device_at(device).capability, values | {"ORIGIN": origin_of(device)}, [struct, Term])
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


def launch(
    name: str, weight: ctypes.Structure, x: Tensor, bias: Tensor | None, factor: Tensor | None, rows: int,
    blocks: Blocks | None = None, term: gemv4.Term = None, **constants: int,
) -> Tensor:  # fmt: skip
    """`factor` · x·Wᵀ + b + u·Bᵀ by the kernel `name`, with parameters weight, x, the tiles' parts and x's rows."""
    device = x.get_device()
    (batch, columns) = x.shape
    tiles = tiles_of(x.shape[0])
    blocks = blocks or blocks_for(tiles)
    tile = 64 * blocks.groups
    cut = ceil_div(rows, tile)
    grid = grid_for(cut, columns // STEP, multiprocessors_of(device))
    partials = torch.empty((grid + cut) * tile * 8 * tiles, dtype=torch.float32, device=x.device)
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    sizes = [ctypes.c_uint32(size) for size in (rows, columns, batch, grid)]
    with torch.cuda.device(device):
        bf16 = x.dtype is torch.bfloat16
        product, add = _kernel(name, blocks, device, tiles, bf16, type(weight), tuple(constants.items()))
        product(grid, 128 * blocks.groups + COPYING, [weight, *pointers(x, partials), sizes[2]])
        add(cut * tile * 2 * tiles // ADDED, ADDED, [*pointers(partials, bias, out, factor), *sizes, term_of(term)])
    return out


def obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: gemv4.Term = None, *_: Any,
) -> str | None:  # fmt: skip
    if x.shape[0] < FEWEST or blocksize != BLOCKSIZE:
        return "takes 9 to 64 rows and blocks of 64"
    return wgmma_obstacle(x, packed, absmax) or (
        None if adds(term) else "needs the adapter's ranks in multiples of 8, at multiples of 16 bytes"
    )


@linear_blockwise4.kernel("cuda", unless=obstacle, rank=2)
def gemm(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, term: gemv4.Term = None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    x = x.contiguous()
    weight = weight_of(x, packed, absmax, nested, quant_type, rows)
    return launch("gemm4", weight, x, bias, None, rows, blocks, term, NESTED=int(nested is not None))
