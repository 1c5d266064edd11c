"""Checks of arguments that kernels need before they read memory through pointers.

An accelerator does not raise on a wrong shape; it reads out of bounds. So references and kernels call these first. A
call costs about a microsecond and never synchronises with the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.errors import ModelError

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_float(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` is fp32, fp16, bf16 or, on a CPU, fp64: the kernels compute in fp32."""
    if tensor.dtype not in FLOATS:
        raise ModelError(f"{op}: {name} is {tensor.dtype}", "pass float32, float16 or bfloat16")
    if tensor.dtype is torch.float64 and tensor.device.type not in ("cpu", "meta"):
        raise ModelError(f"{op}: {name} is float64 on {tensor.device.type}, whose kernels compute in float32",
                         "pass float32, or compute on the CPU")  # fmt: skip


def check_same(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise unless `tensor` has the shape, dtype and device of `like`."""
    if tensor.shape != like.shape:
        raise ModelError(f"{op}: {name} is {list(tensor.shape)}, and {like_name} is {list(like.shape)}",
                         "give them one shape")  # fmt: skip
    if tensor.dtype is not like.dtype or tensor.device != like.device:
        actual, expected = f"{tensor.dtype} on {tensor.device}", f"{like.dtype} on {like.device}"
        raise ModelError(f"{op}: {name} is {actual}, and {like_name} {expected}", "give them one dtype and device")


def check_vector(op: str, name: str, tensor: Tensor, size: int, like: Tensor) -> None:
    """Raise unless `tensor` is a contiguous float vector of `size` values on the device of `like`."""
    check_float(op, name, tensor)
    if tensor.dim() != 1 or tensor.shape[0] != size or tensor.device != like.device:
        raise ModelError(f"{op}: {name} is {list(tensor.shape)} on {tensor.device}, not [{size}] on {like.device}")
    if not tensor.is_contiguous():
        raise ModelError(f"{op}: {name} has gaps between its values", f"pass {name}.contiguous()")


def check_rows(op: str, grad: Tensor, x: Tensor, statistic: Tensor, residual_grad: Tensor | None) -> None:
    """Raise unless gradients fit the rows x [..., D] and their statistic [...] that a norm saved."""
    check_float(op, "grad", grad)
    if grad.shape != x.shape:
        raise ModelError(f"{op}: grad is {list(grad.shape)}, and x is {list(x.shape)}")
    if statistic.shape != x.shape[:-1]:
        raise ModelError(f"{op}: rstd is {list(statistic.shape)}, and x is {list(x.shape)}")
    if residual_grad is not None:
        check_same(op, "residual_grad", residual_grad, "x", x)


def row_stride(tensor: Tensor) -> int | None:
    """Elements between the rows (last dimensions) of a tensor with evenly spaced rows, else None."""
    width = tensor.shape[-1]
    if tensor.is_contiguous():
        return width
    if tensor.stride(-1) != 1 and width > 1:
        return None
    stride = extent = None
    for size, step in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size == 1:  # its stride has no meaning
            continue
        if extent is not None and step != extent:
            return None
        stride = step if stride is None else stride
        extent = step * size if extent is None else extent * size
    return width if stride is None else stride
