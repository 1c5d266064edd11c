"""`cuda/planes.cu`: GEMM of up to 16 rows with weights in bit planes."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.gemv_planes import linear_bitplane, linear_hqq
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Kernel, cubin, remembered
from .gemv4 import BATCH, mma_obstacle
from .gemv_planes_row import Planes

NEEDS_BF16 = "needs bf16, as fp16 does not hold every scale"
ROWS = 16  # of W in a tile, of which W must have one


class Blocks(NamedTuple):
    """Constants of `cuda/split_k.cuh`: 16 · `rt` rows a tile, `wr` groups of `wk` warps, `stages` of the ring."""

    rt: int
    wr: int
    wk: int
    stages: int


def blocks_for(bits: int, rows: int, batch: int, multiprocessors: int) -> Blocks:
    """As many groups as a multiprocessor has tiles, so that they all run at once; 8 at most.

    Two slots a ring are enough, and more would take the first-level cache, from which x comes.
    """
    warps = 16 if batch <= 8 and bits < 8 else 8
    rt = 1 if batch <= 8 or bits == 8 or rows < 32 else 2
    groups = min(power_of_2(ceil_div(ceil_div(rows, 16 * rt), multiprocessors)), 8 // rt)
    return Blocks(rt, groups, warps // groups, 2)


@remembered
def _kernel(blocks: Blocks, device: int, batch: int, bf16: bool, bits: int, group: int) -> Kernel:
    """For `batch` rows of x, a power of two."""
    constants = dict(zip(("RT", "WR", "WK", "STAGES"), blocks, strict=True))
    constants |= {"BITS": bits, "GROUP": group, "NT": ceil_div(batch, 8), "BF16": int(bf16)}
    image = cubin("planes", device_at(device).capability, constants | {"ORIGIN": origin_of(device)}, [Planes])
    return Kernel(image, "planes", image.shared_for(batch))


def multiply(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codebook: Tensor, bits: int, group: int,
    rows: int, bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_bitplane`, or with a `group` `linear_hqq`."""
    x, device, batch = x.contiguous(), x.get_device(), x.shape[0]
    blocks = blocks or blocks_for(bits, rows, batch, multiprocessors_of(device))
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, codebook)], rows, x.shape[1])
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out, factor)]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, power_of_2(batch), x.dtype is torch.bfloat16, bits, group)
        grid = min(ceil_div(rows, 16 * blocks.rt), multiprocessors_of(device))
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *pointers, ctypes.c_uint32(batch)])
    return out


def _obstacle(x: Tensor, rows: int, *of_weight: Tensor) -> str | None:
    if not 1 <= x.shape[0] <= BATCH or rows < ROWS:
        return "takes 1 to 16 rows, and N from 16"
    return mma_obstacle(x, *of_weight)


def bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    return _obstacle(x, rows, packed, scales)


def hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, *_: Any
) -> str | None:
    return _obstacle(x, rows, packed, scales, zeros) if x.dtype is torch.bfloat16 else NEEDS_BF16


@linear_bitplane.kernel("cuda", unless=bitplane_obstacle, rank=3)
def bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    bits = codebook.numel().bit_length() - 1
    return multiply(x, packed, scales, scales, factor, codebook, bits, 0, rows, bias)


@linear_hqq.kernel("cuda", unless=hqq_obstacle, rank=2)
def hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    return multiply(x, packed, scales, zeros, scales, scales, bits, group, rows, bias)
