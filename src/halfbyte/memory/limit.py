"""`memory_limit_gib`, kept: torch's allocator refuses what goes beyond, after it has given back what it only caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..utils.hardware import free_cached_memory

if TYPE_CHECKING:
    import torch


FIRST_KERNELS = 256 * 2**20  # bytes of a device that a run's first steps take beside torch's allocator: 0.17 GiB seen


@contextlib.contextmanager
def held_to(device: torch.device, limit: int | None) -> Iterator[None]:
    """Inside, torch reserves at most `limit` bytes of a CUDA device beyond what is in use on entering.

    An allocation that would pass the limit frees cached memory and is tried again, by the allocator itself; then it is
    `torch.OutOfMemoryError`. The CUDA context and its libraries' own memory (some 0.5 GiB) are not torch's, and stay
    uncounted. None, and other devices: no limit.
    """
    import torch

    if limit is None or device.type != "cuda":
        yield
        return
    free_cached_memory(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    share = (limit + torch.cuda.memory_reserved(device)) / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(share, before), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
