"""y = x·Wᵀ + b with a frozen quantized W: dequantize, multiply, forget; dequantize again for dX.

Where no gradient is wanted, the format multiplies as it likes: few rows need no dequantized copy of W.

Nothing of W is saved in full precision and W gets no gradient. In eager mode this is an `autograd.Function`. Under
torch.compile it must be two *distinct* opaque ops: with a visible dequantize, common-subexpression elimination merges
the forward's with the backward's and keeps the full-precision weight alive in between (docs/design.md, decision 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..formats import from_spec
from ..ops.rows import linear

if TYPE_CHECKING:
    from ..tensor import QuantizedTensor


def quantized_linear(input: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a quantized weight.

    Args:
        input: [..., K], float; the product runs in its dtype, or autocast's.
        weight: [N, K] quantized.
        bias: [N] or None.

    Returns:
        [..., N] in the dtype of the product.
    """
    input = to_compute_dtype(input)
    if bias is not None and bias.dtype != input.dtype:
        bias = bias.to(input.dtype)
    if on_compiler():
        return torch.ops.halfbyte.quantized_linear(
            input, list(weight.parts.values()), bias, weight.format.spec, list(weight.shape)
        )
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        return _QuantizedLinear.apply(input, weight, bias)
    rows, columns = weight.shape
    product = weight.format.linear(input.reshape(-1, columns), weight.parts, (rows, columns), bias)
    return product.view(*input.shape[:-1], rows)


def frozen_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a plain weight that gets no gradient, nor its bias, by the library that is faster (`ops.rows`).

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
        ctx.weight = weight  # as below
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        return linear(grad, ctx.weight.t()), None, None


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        # An attribute, not save_for_backward: W is a frozen parameter that outlives the graph, and hooks that
        # offload saved activations must not carry it along.
        ctx.weight = weight
        return linear(input, weight.dequantize(input.dtype), bias)

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
_library.define("quantized_linear_dx(Tensor grad, Tensor[] parts, str spec, SymInt[] shape) -> Tensor")


def _dequantize(parts: list[Tensor], spec: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    format_ = from_spec(spec)
    names = format_.part_specs(tuple(shape))
    return format_.dequantize(dict(zip(names, parts, strict=True)), tuple(shape), dtype)


def _forward(input, parts, bias, spec, shape):
    return linear(input, _dequantize(parts, spec, shape, input.dtype), bias)


def _backward_input(grad, parts, spec, shape):
    return linear(grad, _dequantize(parts, spec, shape, grad.dtype).t())


_library.impl("quantized_linear", _forward, "CompositeExplicitAutograd")
_library.impl("quantized_linear_dx", _backward_input, "CompositeExplicitAutograd")


@torch.library.register_fake("halfbyte::quantized_linear", lib=_library)
def _(input, parts, bias, spec, shape):
    return input.new_empty((*input.shape[:-1], shape[0]))


@torch.library.register_fake("halfbyte::quantized_linear_dx", lib=_library)
def _(grad, parts, spec, shape):
    return grad.new_empty((*grad.shape[:-1], shape[1]))


def _setup_context(ctx, inputs, output):
    _, parts, bias, spec, shape = inputs
    ctx.save_for_backward(*parts)
    ctx.spec, ctx.shape, ctx.has_bias = spec, shape, bias is not None


def _backward(ctx, grad):
    grad_input = torch.ops.halfbyte.quantized_linear_dx(grad, list(ctx.saved_tensors), ctx.spec, ctx.shape)
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.has_bias else None
    return grad_input, [None] * len(ctx.saved_tensors), grad_bias, None, None


torch.library.register_autograd("halfbyte::quantized_linear", _backward, setup_context=_setup_context, lib=_library)
