"""Tensors exchanged within a group of processes; a group of None is this process alone, which they pass by.

Nothing here is differentiable: whoever calls it writes its own backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def members(group: Any) -> int:
    """How many processes it has."""
    return 1 if group is None else dist.get_world_size(group)


def gathered(part: Tensor, group: Any) -> Tensor:
    """[n, ...] of each process, as long in all, one after another: [ways·n, ...]."""
    if group is None:
        return part
    whole = part.new_empty(members(group) * part.shape[0], *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def scattered_sum(whole: Tensor, group: Any) -> Tensor:
    """This process's part [n, ...] of the sum over all processes of `whole` [ways·n, ...]."""
    if group is None:
        return whole
    part = whole.new_empty(whole.shape[0] // members(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
    return part


def summed(part: Tensor, group: Any) -> Tensor:
    """The sum over all processes, in place."""
    if group is not None:
        dist.all_reduce(part, group=group)
    return part


def longest(number: int, group: Any) -> int:
    """The largest of all processes' numbers, told from host to host: no device is waited for."""
    if group is None:
        return number
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return int(found)
