"""Tensors as kernels take and leave them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.checks import row_stride


def same(used: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Whether no copy stands in for a tensor that was given."""
    return all(map(operator.is_, used, given))


def evenly_spaced(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor whose rows are evenly spaced, copied where they were not, and the elements from row to row."""
    stride = row_stride(tensor)
    return (tensor, stride) if stride is not None else (tensor.contiguous(), tensor.shape[-1])


def put_back(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Finish what a kernel did in place: copy where a copy stood in for a tensor, and tell autograd of the change.

    A function that saved one of `tensors` is then refused it in backward, instead of reading what is there now.
    """
    for tensor, result in zip(tensors, results, strict=True):
        if result is not tensor:
            tensor.copy_(result)
    changed(*tensors)


def changed(*tensors: Tensor) -> None:
    """Tell autograd that a kernel has written to these."""
    if not torch.is_inference_mode_enabled():  # whose tensors keep no version
        torch.autograd.graph.increment_version(tensors)


def fresh(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty contiguous tensor of the shape and device of `like`."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def fresh_statistic(x: Tensor) -> Tensor:
    """An empty fp32 tensor of one number for each row of x [..., D]."""
    return torch.empty([*x.shape[:-1]], dtype=torch.float32, device=x.device)  # a torch.Size is parsed 3 µs longer
