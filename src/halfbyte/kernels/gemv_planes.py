"""`cuda/planes.cu`: the product of up to 16 rows with a k-bit weight; elsewhere dequantize, then the device's GEMM."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ..notices import notice
from ..ops.gemv_planes import linear_bitplane
from .cuda import BuildError
from .gemv4_cuda import Blocks, launch, multiprocessors_of, takes
from .launch import ceil_div, power_of_2

WARPS = {2: (16, 4), 3: (16, 3), 4: (16, 2), 5: (8, 3)}  # of a block, and slots of each one's ring: what fits
ROW_BYTES = {2: 96, 3: 112, 4: 192, 5: 176}  # of codes in a slot: ROW in planes.cu
_refused = False


class Planes(ctypes.Structure):
    """The struct of this name in `planes.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "codebook")),
        ("rows", ctypes.c_uint32),
        ("columns", ctypes.c_uint32),
    )


def table_bytes(k: int) -> int:
    """TABLE in planes.cu."""
    return 2**17 if k == 5 else 2**16


def blocks_for(k: int, rows: int, multiprocessors: int) -> Blocks:
    """As many groups as a multiprocessor has tiles, so that they all run at once; 8 at most."""
    warps, stages = WARPS[k]
    groups = min(power_of_2(ceil_div(ceil_div(rows, 16), multiprocessors)), 8)
    return Blocks(1, groups, warps // groups, stages)


def product(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    """`linear_bitplane` of contiguous tensors that `gemv4_cuda.takes` accepts.

    Raises:
        BuildError: the kernel does not compile here.
    """
    k = codebook.numel().bit_length() - 1
    weight = Planes(packed.data_ptr(), scales.data_ptr(), codebook.data_ptr(), rows, x.shape[1])
    table = table_bytes(k)
    blocks = blocks or blocks_for(k, rows, multiprocessors_of(x.get_device()))
    return launch("planes", weight, x, bias, [factor], rows, blocks, table, ROW_BYTES[k] + 8, BITS=k)


@linear_bitplane.twin("cuda", "xpu")
def linear(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    global _refused
    x = x.contiguous()
    weight = packed, scales, factor, codebook, rows
    if not _refused and takes(x, packed, scales):
        try:
            return product(x, *weight, bias)
        except BuildError as error:
            _refused = True
            notice("gemv-planes-cuda", f"{error}; products of few rows with k-bit weights dequantize them, more slowly")
    return linear_bitplane.reference(x, *weight, bias)
