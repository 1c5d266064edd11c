"""Gradient reduction: one all-reduce per optimizer step over the ranks that computed different parts of the gradients.

The loss of a step is its sum over all tokens divided by their number on all ranks, so gradients are summed, never
averaged. They are reduced in a few flat all-reduces after the last backward of the step: adapters are 0.6% of a model,
so overlapping buckets with the backward would save 0.1% of a step and rule out CUDA graphs.

A parameter that is sharded along "tensor" has the attribute `sharded_along`; its local gradient is complete. Replicated
parameters of sharded linears have partial gradients, which are summed along "tensor" too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from .mesh import TOKEN_AXES, Mesh

Axes = tuple[str, ...]
BUCKET = 256 * 2**20  # bytes of one flat all-reduce
SHARDED_ALONG = "sharded_along"  # attribute of a parameter: the mesh axes that it is sharded along
SHARDINGS: tuple[Axes, ...] = ((), ("tensor",), ("shard",))  # possible values of that attribute


def sharded_along(parameter: Tensor) -> Axes:
    """Return the mesh axes that `parameter` is sharded along."""
    return getattr(parameter, SHARDED_ALONG, ())


@torch.no_grad()
def sum_gradients(mesh: Mesh, parameters: Sequence[Tensor], sums: Tensor) -> Tensor:
    """Sum `.grad` of all `parameters`, in place, and `sums` over the ranks that hold parts of them.

    A parameter without a gradient on some ranks counts as zeros there; without one on all ranks it stays None.

    Args:
        sums: sums over this rank's tokens [n]; with pipeline parallelism zeros in all stages but the last.

    Returns:
        Sums over all ranks [n].
    """
    if mesh.size == 1:
        return sums
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    for parameter, anywhere in zip(parameters, mesh.max(has_gradient, (*TOKEN_AXES, "tensor")).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    by_axes: dict[Axes, list[Tensor]] = {(*TOKEN_AXES, "pipeline"): [sums := sums.clone()]}
    for parameter in parameters:
        if parameter.grad is not None:
            shared = () if "tensor" in sharded_along(parameter) else ("tensor",)
            by_axes.setdefault(mesh.active((*TOKEN_AXES, *shared)), []).append(parameter.grad)
    for along, tensors in by_axes.items():
        for bucket in buckets(tensors, BUCKET):
            flat = mesh.sum(torch.cat([tensor.reshape(-1) for tensor in bucket]), along)
            summed = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [piece.view_as(tensor) for piece, tensor in zip(summed, bucket, strict=True)])
    return sums


def buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype into buckets of at most `limit` bytes; a larger tensor has its own bucket."""
    pending: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, size = pending.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        pending[tensor.dtype] = bucket, size + tensor.nbytes
    yield from (bucket for bucket, _ in pending.values())


@torch.no_grad()
def is_norm_distributed(mesh: Mesh, parameters: Sequence[Tensor]) -> bool:
    """Return whether the norm of the gradients needs other ranks: of stages or shards."""
    return mesh.degree("pipeline", "tensor") > 1 or any(map(sharded_along, parameters))


def clip_gradients(mesh: Mesh, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip to `max_norm` by the norm over all stages and shards; returns the norm before clipping."""
    if not is_norm_distributed(mesh, parameters):
        return clip_grad_norm_(parameters, max_norm)
    total = torch.zeros((), device=parameters[0].device)
    for axes in SHARDINGS:
        gradients = [p.grad for p in parameters if sharded_along(p) == axes and p.grad is not None]
        square = get_total_norm(gradients).float().square() if gradients else torch.zeros_like(total)
        total += mesh.sum(square, (*axes, "pipeline"))
    clip_grads_with_norm_(parameters, max_norm, total.sqrt())
    return total.sqrt()
