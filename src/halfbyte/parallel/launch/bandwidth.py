"""How fast the links of a mesh carry bytes while all of its processes use them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ..collectives import gathered
from ..mesh import AXES, Mesh

SHARE = 64 * 2**20  # bytes that each process gives
TIMES = 3


def gather_rate(mesh: Mesh, device: torch.device) -> float | None:
    """Bytes a second that each process receives in an all-gather over all; None where nothing is measured: alone, or on
    a CPU."""
    if mesh.size == 1 or device.type != "cuda":
        return None
    group, own = mesh.group(*AXES), torch.zeros(SHARE, dtype=torch.uint8, device=device)
    return (mesh.size - 1) * SHARE / _seconds(mesh, device, lambda: gathered(own, group))


def host_rate(mesh: Mesh, device: torch.device) -> float | None:
    """Bytes a second that each process copies to pinned host memory while all do, the slowest's; None on a CPU."""
    if device.type != "cuda":
        return None
    here, there = torch.zeros(SHARE, dtype=torch.uint8, device=device), torch.empty(SHARE, dtype=torch.uint8)
    there = there.pin_memory()
    return SHARE / _seconds(mesh, device, lambda: there.copy_(here, non_blocking=True))


def _seconds(mesh: Mesh, device: torch.device, call: Callable[[], Any]) -> float:
    """Of the fastest of a few calls that all processes begin together, the slowest process's."""
    seconds = []
    for _ in range(TIMES):
        torch.cuda.synchronize(device)
        mesh.wait()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return mesh.max(min(seconds))
