"""C: gated units, including those of experts, forward and backward, in one pass over memory."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from ...ops.checks import check_same
from ...ops.experts import Unit, check_unit, expert_unit, expert_unit_backward_
from ...ops.glu import Activation, check_glu, glu, glu_backward_
from ..operands import bump_versions
from . import library, parallel
from .blockwise4 import DTYPES

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
GRAIN = 1 << 14  # least values per thread

_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64
_float = ctypes.c_float


class _Job(ctypes.Structure):
    """`glu_job` of native/glu.c."""

    _fields_ = (
        *[(name, _pointer) for name in ("z", "gate", "up", "out", "weights", "order", "products")],
        *[(name, _int64) for name in ("width", "gate_stride", "up_stride")],
        *[(name, _float) for name in ("limit", "alpha", "offset")],
        *[(name, ctypes.c_int32) for name in ("interleaved", "dtype", "activation", "need_output")],
    )


_lib = library("glu")
for _function in (_lib.halfbyte_glu, _lib.halfbyte_glu_backward):
    _function.argtypes, _function.restype = [_pointer, _int64, _int64], None


def _rows(tensor: Tensor) -> Tensor | None:
    """View as [rows, width] with contiguous rows, or None if there is no such view."""
    try:
        rows = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 else None


def obstacle(gate: Tensor, up: Tensor, activation: Activation, *_: Any) -> str | None:
    if activation not in ACTIVATIONS:
        return "has no erf"
    if gate.dtype not in DTYPES or not gate.numel() or not gate.dim():
        return "takes fp32, bf16 and fp16"
    return None if all(_rows(tensor) is not None for tensor in (gate, up)) else "needs values of a row side by side"


def obstacle_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, *_: Any) -> str | None:
    return obstacle(gate, up, activation) or (None if grad.is_contiguous() else "needs contiguous gradients")


def unit_obstacle(c: Tensor, unit: Unit) -> str | None:
    if unit.activation not in ACTIVATIONS:
        return "has no erf"
    return None if c.dtype in DTYPES and c.numel() else "takes fp32, bf16 and fp16"


def unit_obstacle_backward(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> str | None:
    alike = weights.dtype is torch.float32 and z.is_contiguous() and order.is_contiguous()
    return unit_obstacle(c, unit) or (None if alike else "needs fp32 weights and contiguous rows")


def _run(function: Any, shape: torch.Size, dtype: torch.dtype, activation: str, fields: dict[str, Any]) -> None:
    """Process rows [S, I] with one of the library's functions."""
    rows, width = shape
    numbers: dict[str, Any] = {"limit": math.inf, "alpha": 1.0, "offset": 0.0} | fields
    job = _Job(width=width, dtype=DTYPES[dtype], activation=ACTIVATIONS[activation], **numbers)
    address = ctypes.addressof(job)
    parallel(lambda first, last: function(address, first, last), rows, max(GRAIN // width, 1))


def _halves(gate: Tensor, up: Tensor) -> dict[str, int]:
    return {"gate": gate.data_ptr(), "up": up.data_ptr(), "gate_stride": gate.stride(0), "up_stride": up.stride(0)}


def _of_unit(c: Tensor, unit: Unit) -> dict[str, Any]:
    distance = 1 if unit.interleaved else c.shape[1] // 2
    pointers = {"gate": c.data_ptr(), "up": c.data_ptr() + distance * c.element_size()}
    numbers = {"limit": unit.limit, "alpha": unit.alpha, "offset": unit.offset, "interleaved": unit.interleaved}
    return pointers | numbers | {"gate_stride": c.shape[1], "up_stride": c.shape[1]}


@glu.kernel("cpu", unless=obstacle)
def forward(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    check_glu(gate, up, activation)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    rows, ups = gate.view(-1, gate.shape[-1]), up.view(-1, gate.shape[-1])
    _run(_lib.halfbyte_glu, rows.shape, gate.dtype, activation, {"out": out.data_ptr(), **_halves(rows, ups)})
    return out


@glu_backward_.kernel("cpu", unless=obstacle_backward)
def backward_(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, need_output: bool) -> None:
    check_glu(gate, up, activation)
    check_same("glu_backward", "grad", grad, "gate", gate)
    rows, ups = gate.view(-1, gate.shape[-1]), up.view(-1, gate.shape[-1])
    fields = {"z": grad.data_ptr(), "need_output": need_output, **_halves(rows, ups)}
    _run(_lib.halfbyte_glu_backward, rows.shape, gate.dtype, activation, fields)
    bump_versions(gate, up, *([grad] if need_output else []))


@expert_unit.kernel("cpu", unless=unit_obstacle)
def unit_forward(c: Tensor, unit: Unit) -> Tensor:
    check_unit(c, unit)
    out = c.new_empty(c.shape[0], c.shape[1] // 2)
    _run(_lib.halfbyte_glu, out.shape, c.dtype, unit.activation, {"out": out.data_ptr(), **_of_unit(c, unit)})
    return out


@expert_unit_backward_.kernel("cpu", unless=unit_obstacle_backward)
def unit_backward_(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> Tensor:
    check_unit(c, unit)
    products, order = torch.empty_like(weights), order.int()
    pointers = {"z": z.data_ptr(), "weights": weights.data_ptr(), "order": order.data_ptr()}
    fields = pointers | {"products": products.data_ptr(), "need_output": True} | _of_unit(c, unit)
    _run(_lib.halfbyte_glu_backward, z.shape, z.dtype, unit.activation, fields)
    bump_versions(z, c)
    return products
