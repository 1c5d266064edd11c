"""Memory of the other processes of a host, read where it is, by the copy engines of their devices.

Source: CUDA's inter-process handles, as torch.multiprocessing shares tensors by them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from .collectives import members

DEVICE = 6  # where, among what rebuilds a tensor, its device stands: the reader's, which maps the owner's memory
SAMPLE = 64  # bytes that are compared once


def readable(own: Sequence[Tensor], group: Any) -> list[list[Tensor]] | None:
    """Every process's tensors, for this one to read.

    Args:
        own: uint8 [n] each, as many and as long in all processes of the group; nobody writes to them from here on.

    Returns:
        Of each the processes' [n], in their order, this one's own among them; None if one of the processes cannot read
        another's: on a CPU, on several hosts, where devices have no access to each other. All processes get the same
        answer, and all call this.
    """
    if not own or own[0].device.type != "cuda":
        return None
    device = own[0].device
    torch.cuda.synchronize(device)  # others read at any time from here on
    every = _told(_offered(own, device, members(group)), group)
    place = dist.get_rank(group)
    found = _opened(own, [each and each[place] for each in every], place, device)
    return found if all(_told(found is not None, group)) else None


def _told(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * members(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _offered(own: Sequence[Tensor], device: torch.device, readers: int) -> list[Any] | None:
    """What each reader needs; None where the memory cannot be shared."""
    try:
        handles = [[reduce_tensor(tensor) for tensor in own] for _ in range(readers)]
    except RuntimeError:
        return None
    return [(_host(), device.index, each, own[0][:SAMPLE].tolist()) for each in handles]


def _opened(
    own: Sequence[Tensor], offers: Sequence[Any], place: int, device: torch.device
) -> list[list[Tensor]] | None:
    every: list[Sequence[Tensor]] = []
    for rank, offer in enumerate(offers):
        if rank == place:
            every.append(own)
            continue
        if offer is None or offer[0] != _host() or offer[1] == device.index:
            return None
        _, index, handles, sample = offer
        try:
            if not torch.cuda.can_device_access_peer(device.index, index):
                return None
            theirs = [rebuild(*given[:DEVICE], device.index, *given[DEVICE + 1 :]) for rebuild, given in handles]
            if theirs[0][:SAMPLE].tolist() != sample:
                return None
        except (RuntimeError, AssertionError):
            return None
        every.append(theirs)
    return [list(each) for each in zip(*every, strict=True)]


def _host() -> tuple[str, str, str]:
    """What names this machine; NCCL_HOSTID counts as it does for NCCL."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else "", os.environ.get("NCCL_HOSTID", "")
