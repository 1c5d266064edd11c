"""A step's one reduction: gradients and sums, added over the processes that saw other tokens.

A step's loss is its sum over all tokens divided by their number in all processes, so gradients are summed, never
averaged. They go in a few flat all-reduces after the last backward of the window: adapters are 0.6% of a model, so
overlapping them with the backward, in buckets, would save 0.1% of a step and cost the CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .mesh import TOKENS, Mesh

BUCKET = 256 * 2**20  # bytes that are copied beside each other for one all-reduce


@torch.no_grad()
def sum_gradients(mesh: Mesh, parameters: Sequence[Tensor], sums: Tensor) -> Tensor:
    """Add `.grad` of all `parameters`, in place, and `sums`, over the processes of `TOKENS`.

    Where some processes have no gradient of a parameter, it counts as zeros; where none has, it stays None.

    Args:
        sums: of the step's tokens here [n].

    Returns:
        Of the tokens everywhere [n].
    """
    if mesh.ways(*TOKENS) == 1:
        return sums
    here = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    for parameter, anywhere in zip(parameters, mesh.max(here).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sums = sums.clone()
    for bucket in _buckets([sums, *(parameter.grad for parameter in parameters if parameter.grad is not None)]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        mesh.sum(flat, TOKENS)
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])
    return sums


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that come to `BUCKET` bytes, or one that is larger."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = waiting.setdefault(tensor.dtype, [])
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET:
            yield bucket
            bucket = waiting[tensor.dtype] = []
        bucket.append(tensor)
    yield from filter(None, waiting.values())
