"""Fake quantization: the forward uses dequantize(quantize(W)), the backward ignores the rounding.

This is the straight-through estimator: rounding has derivative zero almost everywhere, so the backward replaces it by
the identity (Bengio, Léonard and Courville 2013, arXiv:1308.3432, §4). The gradient is not clipped. Clipped variants
stop the gradient of weights outside the format's range; here each forward sets every scale from the largest weight of
its block, so no weight is out of range by more than the rounding of the scale. LLM-QAT (Liu et al. 2023,
arXiv:2305.17888, §3.2) does not clip weights either, because outliers matter.

y = x·Qᵀ + b with Q = dequantize(quantize(W + s·B·A)), shapes as in `autograd.lora`. Under the estimator, ∂L/∂Q is the
gradient of W and of the sum W + s·B·A. With G = dyᵀ·x [N, K]:

    dW = G      dB = s·G·Aᵀ = s·dyᵀ·(x·Aᵀ)      dA = s·Bᵀ·G = s·(dy·B)ᵀ·x      dx = dy·Q      db = Σ dy over rows

The right-hand forms avoid G, so a frozen W with an adapter costs as much as LoRA plus two quantizations. Q is not
saved: the backward quantizes again and gets the same bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..autograd.lora import LoRA
from ..dispatch import to_compute_dtype
from ..formats import Format
from ..formats.linear import unviewed
from ..tensor import QuantizedTensor


def fake_quantize(weight: Tensor, format: Format) -> Tensor:
    """dequantize(quantize(weight)) in the weight's shape and dtype; the gradient passes to `weight` unchanged.

    Raises:
        ModelError: the weight has NaN or Inf, or a dtype or shape that the format does not take.
    """
    return _FakeQuantize.apply(weight, format)


def round_trip(weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
    """dequantize(quantize(weight)) in `dtype`, without gradient and with autocast disabled."""
    with torch.autocast(weight.device.type, enabled=False):
        return format.dequantize(format.quantize(weight.detach()), tuple(weight.shape), dtype)


def merged_weight(weight: Tensor, lora: LoRA | None) -> Tensor:
    """W + s·B·A in fp32 [N, K], in the order of operations of PEFT's merge; W itself without an adapter."""
    if lora is None:
        return weight.detach()
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        stored = weight.dequantize(torch.float32) if isinstance(weight, QuantizedTensor) else weight
        return (lora.b.float() @ lora.a.float()).mul_(lora.scaling).add_(stored)


@torch.compiler.disable
def fake_quantized_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, format: Format, lora: LoRA | None = None
) -> Tensor:
    """`F.linear` with the fake-quantized weight, or with the fake-quantized sum of weight and adapter.

    Saves only the input for backward, and only if the weight or the adapter is trained. Breaks the graph under
    torch.compile.

    Args:
        input: [..., K] float; the GEMM runs in its dtype, or in autocast's.
        weight: [N, K], trained or frozen.
        bias: [N] or None.
        format: format to round the weight to.
        lora: adapter to merge before rounding.

    Returns:
        [..., N] in the dtype of the GEMM.

    Raises:
        ModelError: see `fake_quantize`.
    """
    input = to_compute_dtype(input)
    bias = None if bias is None else bias.to(input.dtype)
    factors = (None, None, 0.0) if lora is None else (lora.a, lora.b, lora.scaling)
    return _FakeQuantizedLinear.apply(input, weight, bias, format, *factors)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, format):
        return round_trip(weight, format, weight.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _FakeQuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, format, a, b, scaling):
        # Attributes, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.weight, ctx.format = weight, format
        ctx.lora = None if a is None else LoRA(a, b, scaling)
        if any(ctx.needs_input_grad[index] for index in (1, 4, 5)):
            ctx.save_for_backward(input)
        return unviewed(F.linear(input, _rounded(ctx, input.dtype), bias))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        needs, lora = ctx.needs_input_grad, ctx.lora
        rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = grad_a = grad_b = None
        if needs[0]:
            grad_input = grad @ _rounded(ctx, grad.dtype)
        for input in ctx.saved_tensors:  # one or none; unpacked only once, since checkpointing recomputes it on access
            x = input.reshape(-1, ctx.weight.shape[1])
        if needs[1]:
            grad_weight = (rows.t() @ x).to(ctx.weight.dtype)
        if needs[2]:
            grad_bias = rows.sum(0)
        if needs[4]:
            grad_a = ((rows @ lora.b.to(rows.dtype)).t() @ x * lora.scaling).to(lora.a.dtype)
        if needs[5]:
            grad_b = (rows.t() @ (x @ lora.a.to(rows.dtype).t()) * lora.scaling).to(lora.b.dtype)
        return grad_input, grad_weight, grad_bias, None, grad_a, grad_b, None


def _rounded(ctx, dtype: torch.dtype) -> Tensor:
    return round_trip(merged_weight(ctx.weight, ctx.lora), ctx.format, dtype)
