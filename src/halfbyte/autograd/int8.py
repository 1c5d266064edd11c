"""y = x·Wᵀ + b by LLM.int8(): x is quantized per row at run time, W is int8 already; backward by the dequantized W.

As in `autograd.linear`: an autograd.Function in eager mode, opaque ops under torch.compile, and nothing of W is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..ops import int8 as ops
from ..ops.linear import unviewed
from ..utils.notices import notice
from . import linear as _linear  # noqa: F401  defines quantized_linear_dx, the backward of both

if TYPE_CHECKING:
    from ..tensor import QuantizedTensor


def int8_linear(input: Tensor, weight: QuantizedTensor, bias: Tensor | None = None, threshold: float = 6.0) -> Tensor:
    """`F.linear` for an int8 weight, in int8 where torch multiplies it; elsewhere by the dequantized weight, said once.

    Args:
        input: [..., K], float; results are in its dtype, or autocast's.
        weight: [N, K] in format int8.
        bias: [N] or None.
        threshold: columns of the input with a magnitude from here on are multiplied unquantized; 0: none.

    Returns:
        [..., N].
    """
    input = to_compute_dtype(input)
    if bias is not None and bias.dtype != input.dtype:
        bias = bias.to(input.dtype)
    if on_compiler():
        return torch.ops.halfbyte.int8_linear(input, *weight.parts.values(), bias, float(threshold))
    return _Int8Linear.apply(input, weight, bias, threshold)


def _product(input: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    rows = codes.shape[0]
    if not input.numel():
        return F.linear(input, ops.dequantize_rows_int8(codes, absmax, input.dtype), bias)
    if not ops.multiplies_int8(input, rows):
        notice(
            f"int8-product-{input.device.type}",
            f"torch multiplies no int8 matrices of {rows} x {input.shape[-1]} on this {input.device.type}, or not "
            "exactly: such layers run by their dequantized weight, with unquantized inputs",
        )
        return F.linear(input, ops.dequantize_rows_int8(codes, absmax, input.dtype), bias)
    x = input.reshape(-1, input.shape[-1])
    return ops.int8_linear(x, codes, absmax, bias, threshold).view(*input.shape[:-1], rows)


def _forward(input: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    return unviewed(_product(input, codes, absmax, bias, threshold))


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, threshold):
        ctx.weight = weight  # an attribute: see autograd.linear
        return _forward(input, weight.parts["codes"], weight.parts["absmax"], bias, threshold)

    @staticmethod
    def backward(ctx, grad):
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad @ ctx.weight.dequantize(grad.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_input, None, grad_bias, None


_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("int8_linear(Tensor input, Tensor codes, Tensor absmax, Tensor? bias, float threshold) -> Tensor")
_library.impl("int8_linear", _forward, "CompositeExplicitAutograd")


@torch.library.register_fake("halfbyte::int8_linear", lib=_library)
def _(input, codes, absmax, bias, threshold):
    return input.new_empty((*input.shape[:-1], codes.shape[0]))


def _setup_context(ctx, inputs, output):
    _, codes, absmax, bias, _ = inputs
    ctx.save_for_backward(codes, absmax)
    ctx.has_bias = bias is not None


def _backward(ctx, grad):
    codes, absmax = ctx.saved_tensors
    grad_input = torch.ops.halfbyte.quantized_linear_dx(grad, [codes, absmax], "int8", list(codes.shape))
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
    return grad_input, None, None, grad_bias, None


torch.library.register_autograd("halfbyte::int8_linear", _backward, setup_context=_setup_context, lib=_library)
