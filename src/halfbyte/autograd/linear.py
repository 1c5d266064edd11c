"""y = x·Wᵀ + b with a frozen quantized W, which is dequantized in the forward and again in the backward for dX.

W gets no gradient, and its full-precision values are not saved. Without a gradient, `Format.linear` multiplies, whose
kernels for few rows do not dequantize W to memory.

In eager mode this is an `autograd.Function`. Under torch.compile it must be two *distinct* opaque ops: with a visible
dequantize, common-subexpression elimination merges the forward's with the backward's and keeps the full-precision
weight alive in between (docs/design/kernels-and-autograd.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..formats import Format, from_spec
from ..formats.base import FLOATS, QuantizedLike
from ..formats.linear import linear, unviewed


def quantized_linear(input: Tensor, weight: QuantizedLike, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a quantized weight.

    Args:
        input: [..., K], float; the GEMM runs in its dtype, or in autocast's.
        weight: [N, K] quantized.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of the GEMM.
    """
    input = to_compute_dtype(input)
    if bias is not None and bias.dtype != input.dtype:
        bias = bias.to(input.dtype)
    needs_grad = torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))
    if on_compiler():
        ops = torch.ops.halfbyte
        op = ops.quantized_linear if needs_grad else ops.quantized_product
        return op(input, list(weight.parts.values()), bias, weight.format.spec, list(weight.shape))
    if needs_grad:
        return _QuantizedLinear.apply(input, weight, bias)
    return _product(input, weight.format, weight.parts, tuple(weight.shape), bias)


def _product(
    input: Tensor, format_: Format, tensors: Mapping[str, Tensor], shape: tuple[int, ...], bias: Tensor | None
) -> Tensor:
    """[..., N] without a gradient, by `Format.linear`."""
    rows, columns = shape
    x = input.reshape(-1, columns)
    if input.dtype in FLOATS:
        product = format_.linear(x, tensors, (rows, columns), bias)
    else:
        product = linear(x, format_.values(tensors, shape, input.dtype), bias)
    return unviewed(product.view(*input.shape[:-1], rows))


def frozen_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a plain frozen weight and bias, by the faster CPU library (see `formats.linear`).

    Args:
        input: [..., K], of the weight's dtype.
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [..., N].
    """
    if torch.is_grad_enabled() and input.requires_grad:
        return _FrozenLinear.apply(input, weight, bias)
    return linear(input, weight, bias)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.weight = weight  # an attribute: see _QuantizedLinear
        return unviewed(linear(input, weight, bias))

    @staticmethod
    def backward(ctx, grad):
        return linear(grad, ctx.weight.t()), None, None


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        # An attribute, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.weight = weight
        return unviewed(linear(input, weight.dequantize(input.dtype), bias))

    @staticmethod
    def backward(ctx, grad):
        grad_input = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = linear(grad, ctx.weight.dequantize(grad.dtype).t())
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_input, None, grad_bias


_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("quantized_linear(Tensor input, Tensor[] parts, Tensor? bias, str spec, SymInt[] shape) -> Tensor")
_library.define("quantized_product(Tensor input, Tensor[] parts, Tensor? bias, str spec, SymInt[] shape) -> Tensor")
_library.define("quantized_linear_dx(Tensor grad, Tensor[] parts, str spec, SymInt[] shape) -> Tensor")
_library.define("dequantize(Tensor[] parts, str spec, SymInt[] shape, ScalarType dtype) -> Tensor")


def decode(format_: Format, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`format_.values`; under torch.compile, one opaque op."""
    if on_compiler():
        return torch.ops.halfbyte.dequantize(list(tensors.values()), format_.spec, list(shape), dtype)
    return format_.values(tensors, shape, dtype)


def _named(tensors: list[Tensor], spec: str, shape: list[int]) -> tuple[Format, dict[str, Tensor]]:
    format_ = from_spec(spec)
    return format_, dict(zip(format_.part_specs(tuple(shape)), tensors, strict=True))


def _dequantize(tensors: list[Tensor], spec: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    format_, named = _named(tensors, spec, shape)
    return format_.values(named, tuple(shape), dtype)


_library.impl(
    "quantized_linear",
    lambda input, tensors, bias, spec, shape: linear(input, _dequantize(tensors, spec, shape, input.dtype), bias),
    "CompositeExplicitAutograd",
)
_library.impl(
    "quantized_product",
    lambda input, tensors, bias, spec, shape: _product(input, *_named(tensors, spec, shape), tuple(shape), bias),
    "CompositeExplicitAutograd",
)
_library.impl(
    "quantized_linear_dx",
    lambda grad, tensors, spec, shape: linear(grad, _dequantize(tensors, spec, shape, grad.dtype).t()),
    "CompositeExplicitAutograd",
)
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")


for _name in ("quantized_linear", "quantized_product"):
    torch.library.register_fake(
        f"halfbyte::{_name}",
        lambda input, tensors, bias, spec, shape: input.new_empty((*input.shape[:-1], shape[0])),
        lib=_library,
    )
torch.library.register_fake(
    "halfbyte::quantized_linear_dx",
    lambda grad, tensors, spec, shape: grad.new_empty((*grad.shape[:-1], shape[1])),
    lib=_library,
)
torch.library.register_fake(
    "halfbyte::dequantize", lambda tensors, spec, shape, dtype: tensors[0].new_empty(shape, dtype=dtype), lib=_library
)


def _setup_context(ctx, inputs, output):
    _, tensors, bias, spec, shape = inputs
    ctx.save_for_backward(*tensors)
    ctx.spec = spec
    ctx.shape = shape
    ctx.has_bias = bias is not None


def _backward(ctx, grad):
    grad_input = torch.ops.halfbyte.quantized_linear_dx(grad, list(ctx.saved_tensors), ctx.spec, ctx.shape)
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
    return grad_input, [None] * len(ctx.saved_tensors), grad_bias, None, None


torch.library.register_autograd("halfbyte::quantized_linear", _backward, setup_context=_setup_context, lib=_library)
