"""How fast the links of a mesh carry bytes while all of its processes use them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .mesh import AXES, Mesh

SHARE = 64 * 2**20  # bytes that each process gives
TIMES = 3


def gather_rate(mesh: Mesh, device: torch.device) -> float | None:
    """Bytes a second that each process receives in an all-gather over all; None where nothing is measured: alone, or on
    a CPU."""
    if mesh.size == 1 or device.type != "cuda":
        return None
    group, own = mesh.group(*AXES), torch.zeros(SHARE, dtype=torch.uint8, device=device)
    every = torch.empty(mesh.size * SHARE, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(TIMES):
        torch.cuda.synchronize(device)
        mesh.wait()
        began = time.perf_counter()
        dist.all_gather_into_tensor(every, own, group=group)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return (mesh.size - 1) * SHARE / mesh.max(min(seconds))


def host_rate(mesh: Mesh, device: torch.device) -> float | None:
    """Bytes a second that each process copies to pinned host memory while all do, the slowest's; None on a CPU."""
    if device.type != "cuda":
        return None
    here, there = torch.zeros(SHARE, dtype=torch.uint8, device=device), torch.empty(SHARE, dtype=torch.uint8)
    there, seconds = there.pin_memory(), []
    for _ in range(TIMES):
        torch.cuda.synchronize(device)
        mesh.wait()
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return SHARE / mesh.max(min(seconds))
