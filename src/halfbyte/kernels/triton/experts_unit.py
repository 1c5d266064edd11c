"""Triton: an expert's unit in one pass over its rows, and its backward with the routing weight's gradient in another.

Backward reads z and c and writes h and dc in their places: 12 bytes a value of h in 16 bits. A program has whole rows,
since ⟨z, h⟩ is a sum over one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops import experts_unit as reference
from ...ops.experts_unit import Unit
from ..operands import put_back
from ..tiling import ceil_div, power_of_2
from .glu import activation_and_derivative
from .launch import Launcher

BLOCK = 1024  # values of a row at a time
WARPS = 4


@triton.jit
def _load(c_ptr, row, col, width, STEP: tl.constexpr):
    """gate and up, in fp32, and where they stand."""
    beside = width if STEP == 1 else 1
    gates = c_ptr + row * 2 * width + col * STEP
    ups = gates + beside
    g = tl.load(gates, mask=col < width, other=0.0).to(tl.float32)
    u = tl.load(ups, mask=col < width, other=0.0).to(tl.float32)
    return g, u, gates, ups


@triton.jit
def _activated(g, u, limit, alpha, offset, ACTIVATION: tl.constexpr):
    """a(g), a′(g) and u + offset; a value that is no number stays none."""
    g = tl.where(g > limit, limit, g)
    u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    activated, derivative = activation_and_derivative(g * alpha, ACTIVATION)
    return activated / alpha, derivative, u + offset


@triton.jit
def _forward(
    c_ptr, out_ptr, width, limit, alpha, offset, STEP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    g, u, _, _ = _load(c_ptr, row, col, width, STEP)
    activated, _, shifted = _activated(g, u, limit, alpha, offset, ACTIVATION)
    tl.store(out_ptr + row * width + col, (activated * shifted).to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _backward(
    z_ptr, c_ptr, weight_ptr, order_ptr, out_ptr, width, limit, alpha, offset,
    STEP: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(order_ptr + row)
    weight = tl.load(weight_ptr + slot)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < width
        g, u, gates, ups = _load(c_ptr, row, col, width, STEP)
        z = tl.load(z_ptr + row * width + col, mask=mask, other=0.0).to(tl.float32)
        activated, derivative, shifted = _activated(g, u, limit, alpha, offset, ACTIVATION)
        h = (activated * shifted).to(z_ptr.dtype.element_ty)
        total += z * h.to(tl.float32)
        dh = z * weight
        d_gate = tl.where(g > limit, 0.0, dh * shifted * derivative)
        d_up = tl.where(tl.abs(u) > limit, 0.0, dh * activated)
        tl.store(gates, d_gate.to(c_ptr.dtype.element_ty), mask=mask)
        tl.store(ups, d_up.to(c_ptr.dtype.element_ty), mask=mask)
        tl.store(z_ptr + row * width + col, h, mask=mask)
    tl.store(out_ptr + slot, tl.sum(total, axis=0))


_forward_launcher, _backward_launcher = Launcher(_forward), Launcher(_backward)


def _constants(unit: Unit, width: int) -> tuple:
    return 2 if unit.interleaved else 1, unit.activation, min(BLOCK, max(power_of_2(width), 32))


@reference.expert_unit.kernel("cuda", "xpu")
def expert_unit(c: Tensor, unit: Unit) -> Tensor:
    reference.check_unit(c, unit)
    rows, width = c.shape[0], c.shape[1] // 2
    out = torch.empty(rows, width, dtype=c.dtype, device=c.device)
    constants = _constants(unit, width)
    if out.numel():
        _forward_launcher(
            rows * ceil_div(width, constants[-1]), (c, out), (width, unit.limit, unit.alpha, unit.offset), constants,
            WARPS,
        )  # fmt: skip
    return out


@reference.expert_unit_backward_.kernel("cuda", "xpu")
def expert_unit_backward_(z: Tensor, c: Tensor, unit: Unit, weights: Tensor, order: Tensor) -> Tensor:
    reference.check_unit(c, unit)
    rows, width = z.shape
    out = torch.empty_like(weights)
    if z.numel():
        _backward_launcher(
            rows, (z, c, weights, order, out), (width, unit.limit, unit.alpha, unit.offset), _constants(unit, width),
            WARPS,
        )  # fmt: skip
        put_back((z, c), (z, c))
    return out
