"""How many bytes a run may use."""

from __future__ import annotations

import psutil
import torch

from ..config import RunConfig

GIB = 2**30


def free_bytes(device: torch.device, processes: int = 1) -> int:
    """Of `device` now; of a CPU's memory, which the processes of a host share, the part of one."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "xpu" and torch.xpu.is_available():
        return torch.xpu.mem_get_info(device)[0]
    return psutil.virtual_memory().available // processes


def within_limit(config: RunConfig, free: int) -> int:
    return free if config.memory_limit_gib is None else min(free, int(config.memory_limit_gib * GIB))
