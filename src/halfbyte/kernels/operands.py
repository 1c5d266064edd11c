"""Preparation of kernels' operands and of their results."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.checks import row_stride


def all_same(used: Sequence[Tensor], originals: Sequence[Tensor]) -> bool:
    """Return whether each tensor used is the given tensor itself, not a copy."""
    return all(map(operator.is_, used, originals))


def evenly_spaced(tensor: Tensor) -> tuple[Tensor, int]:
    """`tensor`, copied if its rows are not evenly spaced, and the elements from row to row."""
    stride = row_stride(tensor)
    return (tensor, stride) if stride is not None else (tensor.contiguous(), tensor.shape[-1])


def copy_back(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Finish an in-place kernel: copy results back where the kernel ran on a copy, and bump the version counters.

    Backward then raises for a function that saved one of `tensors`, instead of reading the new values.
    """
    for tensor, result in zip(tensors, results, strict=True):
        if result is not tensor:
            tensor.copy_(result)
    bump_versions(*tensors)


def bump_versions(*tensors: Tensor) -> None:
    """Bump the version counters of tensors that a kernel has written."""
    if not torch.is_inference_mode_enabled():  # inference tensors have no version counter
        torch.autograd.graph.increment_version(tensors)


def empty_contiguous(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty contiguous tensor of the shape and device of `like`."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def empty_statistic(x: Tensor) -> Tensor:
    """An empty fp32 tensor with one number for each row of x [..., D]."""
    return torch.empty([*x.shape[:-1]], dtype=torch.float32, device=x.device)  # a torch.Size takes 3 µs longer


def by_token(x: Tensor) -> tuple[Tensor, int]:
    """Return x [R, T, ·, ·] with contiguous tokens and the distance of two tokens; copies only where that is needed."""
    stride = x.stride(1)
    if x.stride() != (x.shape[1] * stride, stride, x.shape[3], 1):
        x = x.contiguous()
    return x, x.stride(1)
