"""Bandwidth probe of a mesh's links, with all ranks using them at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ...mesh.collectives import all_gather
from ...mesh.mesh import AXES, Mesh

MESSAGE_BYTES = 64 * 2**20  # per rank
REPEATS = 3


def all_gather_bandwidth(mesh: Mesh, device: torch.device) -> float | None:
    """Measure bytes per second that each rank receives in an all-gather over all; None with one process or on a CPU."""
    if mesh.size == 1 or device.type != "cuda":
        return None
    group, message = mesh.group(*AXES), torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    return (mesh.size - 1) * MESSAGE_BYTES / _seconds(mesh, device, lambda: all_gather(message, group))


def host_copy_bandwidth(mesh: Mesh, device: torch.device) -> float | None:
    """Measure bytes per second of the slowest rank's copies to pinned host memory, all ranks at once; None on a CPU."""
    if device.type != "cuda":
        return None
    device_buffer, host_buffer = (
        torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device),
        torch.empty(MESSAGE_BYTES, dtype=torch.uint8),
    )
    host_buffer = host_buffer.pin_memory()
    return MESSAGE_BYTES / _seconds(mesh, device, lambda: host_buffer.copy_(device_buffer, non_blocking=True))


def _seconds(mesh: Mesh, device: torch.device, call: Callable[[], Any]) -> float:
    """Time a few synchronized calls; returns the slowest rank's fastest call."""
    seconds = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        mesh.barrier()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return mesh.max(min(seconds))
