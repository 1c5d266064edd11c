"""`cuda/low_rank.cu`: an adapter's first product for up to 64 rows, by clusters of blocks.

It takes a Hopper GPU or newer (clusters), 16 bits, K in multiples of 32 and R in multiples of 16; the rest is cuBLAS's.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...ops.low_rank import low_rank_rows
from ..device import HOPPER, device_at, device_of
from ..tiling import ceil_div
from . import Attempts, Kernel, cubin, remembered

BATCH = 64
SPLIT, WARPS = 8, 16  # blocks of a cluster, which is the most that every GPU runs; warps of a block
TILE = 16  # rows of A, and of x, that a cluster has


@remembered
def _kernel(device: int, bf16: bool) -> Kernel:
    constants = {"SPLIT": SPLIT, "WARPS": WARPS, "BF16": int(bf16)}
    image = cubin("low_rank", device_at(device).capability, constants)
    return Kernel(image, "low_rank")


def takes(x: Tensor, a: Tensor) -> bool:
    """True if the kernel can run: the device, dtype and shapes, and how tensors are aligned."""
    return (
        device_of(x).at_least(HOPPER)
        and x.dtype in (torch.bfloat16, torch.float16)
        and 0 < x.shape[0] <= BATCH
        and x.shape[1] % 32 == 0
        and a.shape[0] % TILE == 0
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (x, a))
    )


def product(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """`low_rank_rows` of contiguous tensors that `takes` accepts.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    (batch, columns), rank = x.shape, a.shape[0]
    out = torch.empty(batch, rank, dtype=x.dtype, device=x.device)
    pointers = [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, a, mask, out)]
    with torch.cuda.device(x.get_device()):
        kernel = _kernel(x.get_device(), x.dtype is torch.bfloat16)
        sizes = [ctypes.c_uint32(size) for size in (batch, columns, rank)]
        kernel(rank // TILE * ceil_div(batch, TILE) * SPLIT, 32 * WARPS, [*pointers, *sizes])
    return out


_attempt = Attempts("low-rank-cuda", "adapters' small products run in cuBLAS, more slowly")


@low_rank_rows.kernel("cuda", "xpu")
def rows(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    found = _attempt(product, x, a, mask) if takes(x, a) else None
    return low_rank_rows.reference(x, a, mask) if found is None else found
