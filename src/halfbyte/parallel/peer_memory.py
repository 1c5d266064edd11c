"""Memory of the other processes of a host, read where it is, by the copy engines of their devices.

Source: CUDA's inter-process handles, as torch.multiprocessing shares tensors by them.
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

from ..utils.text import cut
from .collectives import members

DEVICE = 6  # where, among what rebuilds a tensor, its device stands: the reader's, which maps the owner's memory
SAMPLE = 64  # bytes that are compared once


class Readable:
    """Tensors of all processes of a group, for this one to read.

    Attributes:
        each: of each tensor, every process's in their order, this one's own among them.
    """

    def __init__(self, each: list[list[Tensor]]):
        self.each = each
        _held.add(self)


_held: weakref.WeakSet[Readable] = weakref.WeakSet()
_ever: list[bool] = []  # of the groups that asked, whether they could; as many and the same in all their processes


def readable(own: Sequence[Tensor], group: Any) -> tuple[Readable | None, str]:
    """Every process's tensors, for this one to read.

    Args:
        own: uint8 [n] each, as many and as long in all processes of the group; nobody writes to them from here on.

    Returns:
        None where one of the processes cannot read another's: on a CPU, on several hosts, where devices have no access
        to each other, where memory cannot be shared; and why, but for a CPU. All processes get the same answer, and all
        call this.
    """
    if not own or own[0].device.type != "cuda":
        return None, ""
    device, place = own[0].device, dist.get_rank(group)
    torch.cuda.synchronize(device)  # others read at any time from here on
    offers = [offer[place] for offer in _told(_offered(own, device, members(group), place), group)]
    found, why = _opened(own, offers, place, device)
    why = next(filter(None, _told(why, group)), "")
    _ever.append(not why)
    return (None, why) if why else (Readable(found), "")


def let_go(wait: Callable[[], Any]) -> None:
    """Read nothing of other processes any more: before they end, which gives their memory back.

    Args:
        wait: for all processes, which all call this.
    """
    if not any(_ever):
        return
    for held in list(_held):
        for tensors in held.each:
            tensors.clear()
    gc.collect()
    wait()
    torch.cuda.ipc_collect()


def _told(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * members(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _offered(own: Sequence[Tensor], device: torch.device, ways: int, place: int) -> list[Any]:
    """What each of the others needs, or why memory cannot be shared.

    Each handle counts for one that has the memory, which is not free until all have let go: so this process gets none.
    """
    try:
        handles = [[reduce_tensor(tensor) for tensor in own] if at != place else [] for at in range(ways)]
    except RuntimeError as error:
        return [_said(error)] * ways
    return [(_host(), device.index, each, own[0][:SAMPLE].tolist()) for each in handles]


def _opened(
    own: Sequence[Tensor], offers: Sequence[Any], place: int, device: torch.device
) -> tuple[list[list[Tensor]], str]:
    """The tensors of all, or why not."""
    every: list[Sequence[Tensor]] = []
    for rank, offer in enumerate(offers):
        if isinstance(offer, str):
            return [], offer
        host, index, handles, sample = offer
        if rank == place:
            every.append(own)
            continue
        if host != _host():
            return [], "processes are on several hosts"
        try:
            if index == device.index or not torch.cuda.can_device_access_peer(device.index, index):
                return [], f"GPU {device.index} has no access to GPU {index}"
            theirs = [rebuild(*given[:DEVICE], device.index, *given[DEVICE + 1 :]) for rebuild, given in handles]
            if theirs[0][:SAMPLE].tolist() != sample:
                return [], f"GPU {device.index} reads other bytes than GPU {index} holds"
        except (RuntimeError, AssertionError) as error:
            return [], _said(error)
        every.append(theirs)
    return [list(each) for each in zip(*every, strict=True)], ""


def _said(error: Exception) -> str:
    return cut(str(error).splitlines()[0] if str(error) else type(error).__name__, 120)


def _host() -> tuple[str, str, str]:
    """What names this machine; NCCL_HOSTID counts as it does for NCCL."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else "", os.environ.get("NCCL_HOSTID", "")
