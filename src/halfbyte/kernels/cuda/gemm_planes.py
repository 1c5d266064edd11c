"""`cuda/gemm_planes.cu`: GEMM of up to 64 rows with 4-bit weights in bit planes, by Hopper's wgmma."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.gemv_planes import linear_bitplane, linear_hqq
from .gemm4 import FEWEST, Blocks, launch, wgmma_obstacle
from .gemv_planes import NEEDS_BF16, Planes

BITS = 4
FEWEST_HQQ = 17  # rows of x, from which on this is faster than `gemv_planes`


def multiply(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, factor: Tensor, codebook: Tensor, group: int, rows: int,
    bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_bitplane`, or with a `group` `linear_hqq`."""
    x = x.contiguous()
    weight = Planes(*[tensor.data_ptr() for tensor in (packed, scales, zeros, codebook)], rows, x.shape[1])
    added = None if group else factor
    return launch("gemm_planes", weight, x, bias, added, rows, blocks, BITS=BITS, GROUP=group)


def bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, *_: Any
) -> str | None:
    if x.shape[0] < FEWEST or codebook.numel() != 2**BITS:
        return "takes 9 to 64 rows and 4 bits"
    return wgmma_obstacle(x, packed, scales)


def hqq_obstacle(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, *_: Any) -> str | None:
    if x.shape[0] < FEWEST_HQQ or bits != BITS:
        return "takes 17 to 64 rows and 4 bits"
    return wgmma_obstacle(x, packed, scales, zeros) if x.dtype is torch.bfloat16 else NEEDS_BF16


@linear_bitplane.kernel("cuda", unless=bitplane_obstacle, rank=2)
def bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    return multiply(x, packed, scales, scales, factor, codebook, 0, rows, bias)


@linear_hqq.kernel("cuda", unless=hqq_obstacle, rank=1)
def hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    return multiply(x, packed, scales, zeros, scales, scales, group, rows, bias)
