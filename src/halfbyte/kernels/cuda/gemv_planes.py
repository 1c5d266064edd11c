"""Products of few rows with weights in bit planes.

Up to 16 rows `cuda/planes.cu`, up to 64 with 4 bits `cuda/gemm_planes.cu`; others dequantize.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.gemv_planes import linear_bitplane, linear_hqq
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div, power_of_2
from . import Attempts, Kernel, cubin, gemv_planes_row, remembered
from . import gemm4 as gemm_cuda
from .gemv4 import takes
from .gemv_planes_row import Planes

FEWEST_HQQ = 17  # rows of x, from which on `product4` is faster
_attempt = Attempts("gemv-planes-cuda", "products of few rows with bit planes dequantize them, more slowly")


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


def product(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codebook: Tensor, bits: int, group: int,
    rows: int, bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_bitplane`, or with a `group` `linear_hqq`, of contiguous tensors that `_try` accepts.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    device, batch = x.get_device(), x.shape[0]
    if batch == 1 and not group and x.shape[1] % gemv_planes_row.COLUMNS == 0 and blocks is None:
        return gemv_planes_row.product(x, packed, scales, factor, codebook, bits, rows, bias)
    blocks = blocks or blocks_for(bits, rows, batch, multiprocessors_of(device))
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, codebook)], rows, x.shape[1])
    out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, out, factor)]
    with torch.cuda.device(device):
        kernel = _kernel(blocks, device, power_of_2(batch), x.dtype is torch.bfloat16, bits, group)
        grid = min(ceil_div(rows, 16 * blocks.rt), multiprocessors_of(device))
        kernel(grid, 32 * blocks.wr * blocks.wk, [weight, *pointers, ctypes.c_uint32(batch)])
    return out


def product4(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codebook: Tensor, group: int, rows: int,
    bias: Tensor | None, blocks: gemm_cuda.Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`product` with 4 bits of tensors that `gemm_cuda.takes` accepts.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, codebook)], rows, x.shape[1])
    added = None if group else factor
    return gemm_cuda.launch("gemm_planes", weight, x, bias, added, rows, blocks, BITS=4, GROUP=group)


def _try(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, *rest) -> Tensor | None:
    """`product` or `product4` where they can run, else None; says once why they cannot be compiled."""
    factor, codebook, bits, group, rows, bias = rest
    few = rows >= 16 and takes(x, packed, scales, zeros)
    fewest = FEWEST_HQQ if group else gemm_cuda.FEWEST
    more = bits == 4 and x.shape[0] >= fewest and gemm_cuda.takes(x, packed, scales, zeros)
    if more:
        return _attempt(product4, x, packed, scales, zeros, factor, codebook, group, rows, bias)
    return _attempt(product, x, packed, scales, zeros, *rest) if few else None


@linear_bitplane.kernel("cuda", "xpu")
def linear(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    x, bits = x.contiguous(), codebook.numel().bit_length() - 1
    found = _try(x, packed, scales, scales, factor, codebook, bits, 0, rows, bias)
    return linear_bitplane.reference(x, packed, scales, factor, codebook, rows, bias) if found is None else found


@linear_hqq.kernel("cuda", "xpu")
def hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    x, found = x.contiguous(), None
    if x.dtype is torch.bfloat16:  # fp16 does not hold every scale
        found = _try(x, packed, scales, zeros, scales, scales, bits, group, rows, bias)
    return linear_hqq.reference(x, packed, scales, zeros, bits, group, rows, bias) if found is None else found
