"""`cuda/dequantize_planes.cu`: large k-bit weights in bit planes to 16 bits, on a Hopper GPU or newer.

Compiled for sm_90 it takes 5.2, 6.9, 6.9, 8.8 instructions a value at k = 2, 3, 4, 5, where Triton's kernel takes 11.8,
13.2, 14.4, 15.7: a look-up of two values or four by a byte that has their bits as they are.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.bitplane import BLOCK, dequantize_bitplane
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

THREADS = 768  # of a block, one for a multiprocessor
FEWEST_BLOCKS = 2**17  # of 32 weights: below 4M weights Triton's kernel, which starts faster, is as fast
TOGETHER = 32  # blocks that a warp takes at a time: all that there are must be a multiple
STAGES = 4  # of a warp's ring


@remembered
def _kernel(bits: int, device: int, bf16: bool) -> Kernel:
    constants = {"BITS": bits, "BF16": int(bf16), "THREADS": THREADS, "STAGES": STAGES}
    return Kernel(cubin("dequantize_planes", device_at(device).capability, constants), "dequantize_planes")


def obstacle(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor, rows: int, width: int,
    dtype: torch.dtype,
) -> str | None:  # fmt: skip
    if not device_of(packed).at_least(HOPPER):
        return NEEDS_HOPPER
    if zeros is not None or width % BLOCK or dtype is torch.float32:
        return "needs a weight without zeros, whole blocks a row, and 16 bits"
    if not FEWEST_BLOCKS <= scales.numel() < 2**31 or scales.numel() % TOGETHER:
        return "is for 4M weights and more, in multiples of 1024"
    return "needs tensors at multiples of 16 bytes" if (packed.data_ptr() | scales.data_ptr()) % 16 else None


@dequantize_bitplane.kernel("cuda", unless=obstacle, rank=1)
def dequantize(
    packed: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor, codebook: Tensor, rows: int, width: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    device, blocks = packed.get_device(), scales.numel()
    out = torch.empty(rows, width, dtype=dtype, device=packed.device)
    with torch.cuda.device(device):
        kernel = _kernel(codebook.numel().bit_length() - 1, device, dtype is torch.bfloat16)
        grid = min(ceil_div(blocks, THREADS), multiprocessors_of(device))
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed, scales, factor, codebook, out)]
        kernel(grid, THREADS, [*pointers, ctypes.c_uint32(blocks)])
    return out
