"""Preparation of kernels' operands and of their results."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops.checks import row_stride
from ..ops.optimizer import RULES, Parameters
from ..utils.errors import ModelError

ADDRESS_COLUMNS = 5 + 2 * max(len(rule.states) for rule in RULES.values())  # of `address_table`


def all_same(used: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Return whether each tensor used is the given tensor itself, not a copy."""
    return all(map(operator.is_, used, given))


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


def address_table(parameters: Parameters) -> Tensor:
    """Addresses that an optimizer's kernel reads, int64 [n, ADDRESS_COLUMNS] on the CPU.

    A row has the number of elements, the row of the coefficients, then the addresses of weight, gradient, correction,
    and of codes and scales of each state; 0 for none. The table is cached; a new one is returned if a weight or a
    gradient has moved.

    Raises:
        ModelError: a weight or a gradient is not contiguous.
    """
    launch = parameters.launch
    moving = [*map(Tensor.data_ptr, parameters.weights)], [*map(Tensor.data_ptr, parameters.gradients)]
    if launch.get("moving") != moving:
        if not all(each.is_contiguous() for each in (*parameters.weights, *parameters.gradients)):
            raise ModelError("an optimizer's weight or gradient is not contiguous", "call `contiguous` first")
        if "fixed" not in launch:
            launch["fixed"] = torch.tensor(_fixed_columns(parameters), dtype=torch.int64)
        table = launch["fixed"].clone()
        table[:, 2], table[:, 3] = (torch.tensor(each) for each in moving)
        launch |= {"moving": moving, "addresses": table}
    return launch["addresses"]


def _fixed_columns(parameters: Parameters) -> list[list[int]]:
    """Rows of `address_table` without the addresses of weights and gradients."""
    rows = []
    for i, (row, weight) in enumerate(zip(parameters.rows.tolist(), parameters.weights, strict=True)):
        correction = parameters.corrections[i].data_ptr() if parameters.corrections else 0
        entry = [weight.numel(), row, 0, 0, correction]
        for codes, scales in parameters.states[i]:
            entry += [codes.data_ptr(), 0 if scales is None else scales.data_ptr()]
        rows.append(entry + [0] * (ADDRESS_COLUMNS - len(entry)))
    return rows
