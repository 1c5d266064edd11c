"""Triton: gated units in one pass with 16-byte accesses.

Forward moves 6 bytes a value in 16 bits (g and u in, h out); backward 10, or 12 if it also writes h. Contiguous tensors
are treated as one long row; the halves of a fused projection are strided rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...ops import glu as reference
from ...ops.checks import check_same
from ..operands import copy_back, empty_contiguous, evenly_spaced
from ..tiling import ceil_div
from .launch import Launcher

BLOCK = 2048  # values per program, 16 per thread
WARPS = 4

TWICE_SQRT_2_OVER_PI = tl.constexpr(2 * reference.SQRT_2_OVER_PI)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _span(width, BLOCK: tl.constexpr):
    """Row and columns of a program."""
    blocks = (width - 1) // BLOCK + 1  # tl.cdiv adds first, which overflows for widths close to 2^31
    program = tl.program_id(0)
    row = program // blocks
    return row.to(tl.int64), (program - row * blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _sigmoids(x):
    """σ(x) and 1 − σ(x) = e⁻ˣ·σ(x), without the cancellation of subtracting from 1.

    x is clamped at −80, where σ is 2e-35, to keep e⁻ˣ finite.
    """
    e = tl.exp(-tl.maximum(x, -80.0))
    sigmoid = 1.0 / (1.0 + e)
    return sigmoid, e * sigmoid


@triton.jit
def activation_and_derivative(g, ACTIVATION: tl.constexpr):
    """a(g) and a′(g); the compiler removes an unused one."""
    if ACTIVATION == "gelu":
        p = 0.5 * (1.0 + tl.erf(g * SQRT_HALF))
        derivative = p + g * tl.exp(-0.5 * g * g) * INVERSE_SQRT_2_PI
    elif ACTIVATION == "silu":
        p, complement = _sigmoids(g)
        derivative = p * (1.0 + g * complement)
    else:
        square = g * g
        p, complement = _sigmoids(TWICE_SQRT_2_OVER_PI * g * (1.0 + 0.044715 * square))
        derivative = p * (1.0 + g * TWICE_SQRT_2_OVER_PI * (1.0 + 0.134145 * square) * complement)
    return g * p, derivative


@triton.jit
def _glu(
    gate_ptr, up_ptr, out_ptr, width, gate_stride, up_stride, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, col = _span(width, BLOCK)
    mask = col < width
    g = tl.load(gate_ptr + row * gate_stride + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    u = tl.load(up_ptr + row * up_stride + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    activated, _ = activation_and_derivative(g, ACTIVATION)
    tl.store(out_ptr + row * width + col, (activated * u).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _glu_backward(
    grad_ptr, gate_ptr, up_ptr, width, grad_stride, gate_stride, up_stride,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    row, col = _span(width, BLOCK)
    mask = col < width
    grads = grad_ptr + row * grad_stride + col
    gates = gate_ptr + row * gate_stride + col
    ups = up_ptr + row * up_stride + col
    dh = tl.load(grads, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(ups, mask=mask, other=0.0).to(tl.float32)
    activated, derivative = activation_and_derivative(g, ACTIVATION)
    tl.store(gates, (dh * u * derivative).to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(ups, (dh * activated).to(up_ptr.dtype.element_ty), mask=mask)
    if OUTPUT:
        tl.store(grads, (activated * u).to(grad_ptr.dtype.element_ty), mask=mask)


_glu_launcher = Launcher(_glu)
_glu_backward_launcher = Launcher(_glu_backward)


def _layout(*tensors: Tensor) -> tuple[int, int, list[Tensor], list[int]]:
    """Rows and their width; the tensors, copied if their rows are not evenly spaced; and their row strides."""
    numel = tensors[0].numel()
    if all(tensor.is_contiguous() for tensor in tensors):
        return 1, numel, list(tensors), [numel] * len(tensors)
    spaced = [evenly_spaced(tensor) for tensor in tensors]
    width = tensors[0].shape[-1]
    return numel // width, width, [tensor for tensor, _ in spaced], [stride for _, stride in spaced]


@reference.glu.kernel("cuda", "xpu")
def glu(gate: Tensor, up: Tensor, activation: reference.Activation) -> Tensor:
    reference.check_glu(gate, up, activation)
    out = empty_contiguous(gate, gate.dtype)
    if not out.numel():
        return out
    rows, width, inputs, strides = _layout(gate, up)
    _glu_launcher(rows * ceil_div(width, BLOCK), (*inputs, out), (width, *strides), (BLOCK, activation), WARPS)
    return out


@reference.glu_backward_.kernel("cuda", "xpu")
def glu_backward_(grad: Tensor, gate: Tensor, up: Tensor, activation: reference.Activation, need_output: bool) -> None:
    reference.check_glu(gate, up, activation)
    check_same("glu_backward", "grad", grad, "gate", gate)
    if not gate.numel():
        return
    rows, width, buffers, strides = _layout(grad, gate, up)
    _glu_backward_launcher(
        rows * ceil_div(width, BLOCK), tuple(buffers), (width, *strides), (BLOCK, activation, need_output), WARPS
    )
    written = [grad, gate, up] if need_output else [gate, up]
    copy_back(written, buffers[-len(written) :])
