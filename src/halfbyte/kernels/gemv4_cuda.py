"""`cuda/gemv4.cu`: the product of up to 16 rows with a 4-bit weight on tensor cores.

It takes a Hopper GPU or newer (griddepcontrol), 16-bit x, blocks of 64 and K in multiples of 256; the rest is Triton's.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..notices import notice
from ..ops.codebooks import codebook4
from .cuda import BuildError, Kernel, cubin
from .launch import ceil_div, power_of_2

BATCH, BLOCKSIZE, STEP = 16, 64, 256  # rows of x at most; weights of a scale; columns of K a warp takes at a time
CAPABILITY = (9, 0)
TABLE_BYTES, SHARED_BYTES = 65536, 232448  # of a block: the table of decoded bytes; in all at most

Nested = tuple[Tensor, Tensor, Tensor] | None


class Blocks(NamedTuple):
    """Constants of `cuda/product.cuh`: 16 · `rt` rows a tile, `wr` groups of `wk` warps, `stages` of the ring."""

    rt: int
    wr: int
    wk: int
    stages: int

    def shared_bytes(self, batch: int, nested: bool) -> int:
        rows, warps = 16 * self.rt, self.wr * self.wk
        return TABLE_BYTES + warps * self.stages * rows * (128 + (8 if nested else 16)) + 2 * warps * batch * rows * 4


class Weight(ctypes.Structure):
    """The struct of this name in `gemv4.cu`."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("packed", "absmax", "second", "code", "offset", "codebook")] + [
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    ]


def blocks_for(rows: int, batch: int, multiprocessors: int) -> Blocks:
    """As many groups as a multiprocessor has tiles, so that they all run at once; 8 at most."""
    rt, warps = (1, 16) if batch <= 8 else (2, 8)
    tiles = ceil_div(ceil_div(rows, 16 * rt), multiprocessors)
    groups = min(power_of_2(tiles), 8 // rt)
    return Blocks(rt, groups, warps // groups, 3)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def image(blocks: Blocks, device: int, tiles: int, nested: bool, bf16: bool) -> bytes:
    """The compiled kernel for `tiles` tiles of 8 rows of x."""
    names = ("RT", "WR", "WK", "STAGES", "NT", "NESTED", "BF16")
    constants = dict(zip(names, (*blocks, tiles, int(nested), int(bf16)), strict=True))
    return cubin("gemv4", torch.cuda.get_device_capability(device), constants)


@functools.cache
def _kernel(blocks: Blocks, device: int, tiles: int, nested: bool, bf16: bool) -> Kernel:
    return Kernel(image(blocks, device, tiles, nested, bf16), "gemv4", blocks.shared_bytes(8 * tiles, nested))


def takes(x: Tensor, packed: Tensor, absmax: Tensor, blocksize: int) -> bool:
    """True if `product` can run: the device, x's dtype and size, and how tensors are aligned."""
    device_fits = (
        x.device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(x.device) >= CAPABILITY
    )
    return (
        device_fits
        and x.dtype is not torch.float32
        and 1 <= x.shape[0] <= BATCH
        and blocksize == BLOCKSIZE
        and x.shape[1] % STEP == 0
        and (x.data_ptr() | packed.data_ptr() | absmax.data_ptr()) % 16 == 0
    )


def product(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, quant_type: str, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_blockwise4` of contiguous tensors that `takes` accepts.

    Raises:
        BuildError: the kernel does not compile here.
    """
    batch, columns = x.shape
    device = x.get_device()
    multiprocessors = _multiprocessors(device)
    blocks = blocks or blocks_for(rows, batch, multiprocessors)
    tiles = power_of_2(ceil_div(batch, 8))
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    of_weight = (packed, absmax, second, code, offset, codebook4(quant_type, x.device))
    weight = Weight(*[tensor.data_ptr() for tensor in of_weight], rows, columns)
    pointers = (x, bias, out)
    arguments = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in pointers]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, tiles, nested is not None, x.dtype is torch.bfloat16)
        grid = min(ceil_div(rows, 16 * blocks.rt), multiprocessors)
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *arguments, ctypes.c_uint32(batch)])
    return out


_refused = False


def try_product(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """`product` where it can run, else None; says once why it cannot be compiled."""
    global _refused
    if _refused or not takes(x, packed, absmax, blocksize):
        return None
    try:
        return product(x, packed, absmax, nested, quant_type, rows, bias)
    except BuildError as error:
        _refused = True
        notice("gemv4-cuda", f"{error}; products of few rows with 4-bit weights run in Triton instead, more slowly")
        return None
