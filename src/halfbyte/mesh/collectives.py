"""Collectives within a process group; a group of None is a single process, for which each is the identity.

They are not differentiable: callers write their own backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_size(group: Any) -> int:
    """Number of ranks in `group`."""
    return 1 if group is None else dist.get_world_size(group)


def all_gather(shard: Tensor, group: Any) -> Tensor:
    """Concatenate the ranks' shards [n, ...], which have equal shapes, to [degree·n, ...]."""
    if group is None:
        return shard
    full = shard.new_empty(group_size(group) * shard.shape[0], *shard.shape[1:])
    dist.all_gather_into_tensor(as_bytes(full), as_bytes(shard), group=group)
    return full


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor, or a contiguous copy of it, as uint8: backends cannot send every dtype (int16, uint16, float8)."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def reduce_scatter(full: Tensor, group: Any) -> Tensor:
    """Sum `full` [degree·n, ...] over the ranks and return this rank's shard [n, ...]."""
    if group is None:
        return full
    shard = full.new_empty(full.shape[0] // group_size(group), *full.shape[1:])
    dist.reduce_scatter_tensor(shard, full.contiguous(), group=group)
    return shard


def all_reduce_(partial: Tensor, group: Any) -> Tensor:
    """Sum over the ranks, in place."""
    if group is not None:
        dist.all_reduce(partial, group=group)
    return partial


def max_int(number: int, group: Any) -> int:
    """Largest of the ranks' numbers, exchanged on the host without a device synchronization."""
    if group is None:
        return number
    largest = torch.tensor(number)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return int(largest)
