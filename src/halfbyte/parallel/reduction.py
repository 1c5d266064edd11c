"""A step's one reduction: gradients and sums, added over the processes that computed other parts of them.

A step's loss is its sum over all tokens divided by their number in all processes, so gradients are summed, never
averaged. They go in a few flat all-reduces after the last backward of the window: adapters are 0.6% of a model, so
overlapping them with the backward, in buckets, would save 0.1% of a step and cost the CUDA graphs.

A parameter that is cut along "tensor" says so (`cut_along`): its gradient is whole where it is. That of one that is not
cut, whose products are, is a part on each process, and the parts are added, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from .mesh import TOKENS, Mesh

Axes = tuple[str, ...]
BUCKET = 256 * 2**20  # bytes that are copied beside each other for one all-reduce
CUT = "cut_along"  # on a parameter: the axes that it is cut along
SLICED: tuple[Axes, ...] = ((), ("tensor",), ("shard",))  # what that may be


def cut_along(parameter: Tensor) -> Axes:
    """The axes along which processes hold different slices of it."""
    return getattr(parameter, CUT, ())


@torch.no_grad()
def sum_gradients(mesh: Mesh, parameters: Sequence[Tensor], sums: Tensor) -> Tensor:
    """Add `.grad` of all `parameters`, in place, and `sums`, over the processes that have parts of them.

    Where some processes have no gradient of a parameter, it counts as zeros; where none has, it stays None.

    Args:
        sums: of the step's tokens here [n]; of a pipeline's, zeros in all stages but the last.

    Returns:
        Of the tokens everywhere [n].
    """
    if mesh.size == 1:
        return sums
    here = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    for parameter, anywhere in zip(parameters, mesh.max(here, (*TOKENS, "tensor")).tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    parts: dict[Axes, list[Tensor]] = {(*TOKENS, "pipeline"): [sums := sums.clone()]}
    for parameter in parameters:
        if parameter.grad is not None:
            shared = () if "tensor" in cut_along(parameter) else ("tensor",)
            parts.setdefault(mesh.wide((*TOKENS, *shared)), []).append(parameter.grad)
    for along, tensors in parts.items():
        for bucket in buckets(tensors, BUCKET):
            flat = mesh.sum(torch.cat([tensor.reshape(-1) for tensor in bucket]), along)
            found = flat.split([tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(found, bucket, strict=True)])
    return sums


def buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype that come to `most` bytes, or one that is larger."""
    waiting: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        bucket, size = waiting.get(tensor.dtype, ([], 0))
        if bucket and size + tensor.nbytes > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        waiting[tensor.dtype] = bucket, size + tensor.nbytes
    yield from (bucket for bucket, _ in waiting.values())


@torch.no_grad()
def clip_gradients(mesh: Mesh, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """The norm of all gradients, those of other stages and slices too, before they are clipped to `max_norm`."""
    if mesh.ways("pipeline", "tensor") == 1 and not any(map(cut_along, parameters)):
        return clip_grad_norm_(parameters, max_norm)
    total = torch.zeros((), device=parameters[0].device)
    for cut in SLICED:
        own = [parameter.grad for parameter in parameters if cut_along(parameter) == cut and parameter.grad is not None]
        square = get_total_norm(own).float().square() if own else torch.zeros_like(total)
        total += mesh.sum(square, (*cut, "pipeline"))
    clip_grads_with_norm_(parameters, max_norm, total.sqrt())
    return total.sqrt()
