"""y = x·Wᵀ + b by LLM.int8(): the forward quantizes x per row and W is int8; the backward uses the dequantized W.

As in `autograd.linear`, it is an autograd.Function in eager mode and opaque ops under torch.compile, and the
dequantized W is not saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..formats import int8 as ops
from ..formats.base import QuantizedLike
from ..formats.linear import unviewed
from ..utils.notices import notice
from . import linear as _linear  # noqa: F401  registers the op quantized_linear_dx, which the backward calls


def int8_linear(input: Tensor, weight: QuantizedLike, bias: Tensor | None = None, threshold: float = 6.0) -> Tensor:
    """`F.linear` for an int8 weight with an int8 GEMM. Where torch has none, use the dequantized weight and log once.

    Args:
        input: [..., K], float; results are in its dtype, or in autocast's.
        weight: [N, K] in format int8.
        bias: [N] or None.
        threshold: input columns with a magnitude of at least this are multiplied unquantized; 0: none.

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
            f"torch has no exact int8 matmul for weights of {rows} x {input.shape[-1]} on this {input.device.type}: "
            "such layers multiply unquantized inputs by the dequantized weight",
        )
        return F.linear(input, ops.dequantize_rows_int8(codes, absmax, input.dtype), bias)
    x = input.reshape(-1, input.shape[-1])
    return ops.int8_linear(x, codes, absmax, bias, threshold).view(*input.shape[:-1], rows)


def _forward(input: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None, threshold: float) -> Tensor:
    return unviewed(_product(input, codes, absmax, bias, threshold))


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, threshold):
        ctx.weight = weight  # an attribute, not save_for_backward: see autograd.linear
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
torch.library.register_fake(
    "halfbyte::int8_linear",
    lambda input, codes, absmax, bias, threshold: input.new_empty((*input.shape[:-1], codes.shape[0])),
    lib=_library,
)


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
