"""`cuda/low_rank.cu`: an adapter's first GEMM for up to 64 rows, by clusters of blocks."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.decode import low_rank_rows
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

BATCH = 64
SPLIT, WARPS = 8, 16  # blocks per cluster (the most that is portable); warps per block
TILE = 16  # rows of A, and of x, per cluster


@remembered
def _kernel(device: int, bf16: bool) -> Kernel:
    constants = {"SPLIT": SPLIT, "WARPS": WARPS, "BF16": int(bf16)}
    image = cubin("low_rank", device_at(device).capability, constants)
    return Kernel(image, "low_rank")


def obstacle(x: Tensor, a: Tensor, mask: Tensor | None) -> str | None:
    if not device_of(x).at_least(HOPPER):  # clusters
        return NEEDS_HOPPER
    if x.dtype not in (torch.bfloat16, torch.float16) or not 0 < x.shape[0] <= BATCH:
        return "takes 1 to 64 rows of 16 bits"
    if x.shape[1] % 32 or a.shape[0] % TILE:
        return "needs K in multiples of 32 and ranks in multiples of 16"
    return (
        None
        if a.is_contiguous() and (x.data_ptr() | a.data_ptr()) % 16 == 0
        else "needs contiguous tensors at multiples of 16 bytes"
    )


@low_rank_rows.kernel("cuda", unless=obstacle)
def gemm(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    (batch, columns), rank = x.shape, a.shape[0]
    out = torch.empty(batch, rank, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, a, mask, out)]
    with torch.cuda.device(x.get_device()):
        kernel = _kernel(x.get_device(), x.dtype is torch.bfloat16)
        sizes = [ctypes.c_uint32(size) for size in (batch, columns, rank)]
        kernel(rank // TILE * ceil_div(batch, TILE) * SPLIT, 32 * WARPS, [*pointers, *sizes])
    return out
