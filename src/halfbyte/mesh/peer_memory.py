"""Peer memory (CUDA IPC): tensors of other ranks on the same host, read in place by the GPUs' copy engines.

Source: CUDA's inter-process handles, as torch.multiprocessing shares tensors.
"""

from __future__ import annotations

import gc
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ..utils.errors import first_line
from ..utils.text import cut
from .collectives import group_size

DEVICE = 6  # index of the device among the arguments that rebuild a shared tensor; the reader passes its own
SAMPLE = 64  # bytes compared with the owner's as a check


class PeerTensors:
    """Tensors of all ranks of a group that this rank may read.

    Attributes:
        by_tensor: for each tensor, the ranks' tensors in order, this rank's own included.
    """

    def __init__(self, by_tensor: list[list[Tensor]]):
        self.by_tensor = by_tensor
        _mapped.add(self)


_mapped: weakref.WeakSet[PeerTensors] = weakref.WeakSet()
_outcomes: list[bool] = []  # success of each `map_peer_tensors`, equal on all ranks of its group


def map_peer_tensors(tensors: Sequence[Tensor], group: Any) -> tuple[PeerTensors | None, str]:
    """Map the tensors of all ranks of `group` into this process; all ranks must call it.

    Args:
        tensors: uint8 [n] each, equal in number and sizes on all ranks, and never written again.

    Returns:
        The tensors and "", or None and the reason (empty on a CPU) if one rank cannot read another's memory: several
        hosts, no peer access between devices, or no shareable memory. All ranks get the same result.
    """
    if not tensors or tensors[0].device.type != "cuda":
        return None, ""
    device, coordinate = tensors[0].device, dist.get_rank(group)
    torch.cuda.synchronize(device)  # other ranks may read from here on
    handles = _gather_objects(_share_handles(tensors, device, group_size(group), coordinate), group)
    offers = [by_rank[coordinate] for by_rank in handles]
    opened, why = _open_handles(tensors, offers, coordinate, device)
    why = next(filter(None, _gather_objects(why, group)), "")
    _outcomes.append(not why)
    return (None, why) if why else (PeerTensors(opened), "")


def release_peer_memory(barrier: Callable[[], Any]) -> None:
    """Unmap the memory of other ranks, before they exit and free it; all ranks must call it.

    Args:
        barrier: blocks until all ranks have called it.
    """
    if not any(_outcomes):
        return
    for mapped in list(_mapped):
        for tensors in mapped.by_tensor:
            tensors.clear()
    gc.collect()
    barrier()
    torch.cuda.ipc_collect()


def _gather_objects(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _share_handles(tensors: Sequence[Tensor], device: torch.device, degree: int, coordinate: int) -> list[Any]:
    """Return the handles for each other rank, or why memory cannot be shared.

    Each handle is a reference that keeps the memory allocated until released, so the own rank gets none.
    """
    try:
        handles = [[reduce_tensor(tensor) for tensor in tensors] if at != coordinate else [] for at in range(degree)]
    except RuntimeError as error:
        return [cut(first_line(error), 120)] * degree
    return [(_host(), device.index, tensor_handles, tensors[0][:SAMPLE].tolist()) for tensor_handles in handles]


def _open_handles(
    tensors: Sequence[Tensor], offers: Sequence[Any], coordinate: int, device: torch.device
) -> tuple[list[list[Tensor]], str]:
    """Return the tensors of all ranks, or why they cannot be opened."""
    every: list[Sequence[Tensor]] = []
    for rank, offer in enumerate(offers):
        if isinstance(offer, str):
            return [], offer
        host, index, handles, sample = offer
        if rank == coordinate:
            every.append(tensors)
            continue
        if host != _host():
            return [], "the ranks are on several hosts"
        try:
            if index == device.index or not torch.cuda.can_device_access_peer(device.index, index):
                return [], f"GPU {device.index} has no access to GPU {index}"
            opened = [rebuild(*args[:DEVICE], device.index, *args[DEVICE + 1 :]) for rebuild, args in handles]
            if opened[0][:SAMPLE].tolist() != sample:
                return [], f"GPU {device.index} reads other bytes than GPU {index} holds"
        except (RuntimeError, AssertionError) as error:
            return [], cut(first_line(error), 120)
        every.append(opened)
    return [list(of_ranks) for of_ranks in zip(*every, strict=True)], ""


def _host() -> tuple[str, str, str]:
    """Return a machine identity; NCCL_HOSTID overrides it as for NCCL."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else "", os.environ.get("NCCL_HOSTID", "")
