"""y = x·Wᵀ + b with both products in FP8: E4M3 forward, E5M2 for the gradient (the "hybrid" recipe; arXiv:2209.05433).

    y  = cast(x)·W8ᵀ · (1/s_x)·s_W            x in E4M3, delayed scaling, one scale a tensor
    dX = cast(dY·s_W)·W8 · (1/s_g)            dY in E5M2, likewise

W8 is in E4M3 with one scale for the tensor, or one a row. A row's scale s_W cannot leave a sum over the rows, which dX
is, so it is multiplied into the columns of dY before they are cast. W is frozen: it has no gradient, x is not saved.

On NVIDIA GPUs with FP8 units the products are torch._scaled_mm. Elsewhere the same codes are multiplied in 16 or 32
bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ModelError
from ..formats import Float8
from ..notices import notice
from ..ops.float8 import E4M3, quantize_float8, transpose_float8
from ..ops.fp8_scaling import Slot

if TYPE_CHECKING:
    from ..tensor import QuantizedTensor

MULTIPLE = 16  # of the sizes of an FP8 product


def fp8_linear(
    input: Tensor, weight: QuantizedTensor | Tensor, bias: Tensor | None, scaling_x: Slot, scaling_grad: Slot
) -> Tensor:
    """`F.linear` with a frozen weight, its products in FP8.

    Args:
        input: [..., K], fp32, fp16 or bf16; results are in its dtype, or autocast's.
        weight: [N, K], quantized in any format or plain. FP8 per tensor or row is multiplied as it is stored; any other
            is cast to E4M3 with one scale a row, in forward and again in backward.
        bias: [N] or None.
        scaling_x: history of the input, in E4M3.
        scaling_grad: history of the output's gradient (times the weight's row scales), in E5M2.

    Returns:
        [..., N].

    Raises:
        ModelError: the weight requires a gradient.
    """
    if weight.requires_grad:
        raise ModelError("fp8_linear: the weight requires a gradient", "freeze it, or compute in bf16")
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        input = input.to(torch.get_autocast_dtype(kind))
    if not input.numel():
        return F.linear(input, weight, bias)
    return _Fp8Linear.apply(input, weight, None if bias is None else bias.to(input.dtype), scaling_x, scaling_grad)


def weight_codes(weight: QuantizedTensor | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """E4M3 [N, K] and fp32 scale, [] or [N]. A kernel that goes from a format's codes straight to E4M3 belongs here."""
    format_ = getattr(weight, "format", None)
    if format_ is None:
        return quantize_float8(weight, "row")
    parts = weight.parts  # type: ignore[union-attr]
    if isinstance(format_, Float8) and format_.scaling != "tile":
        return parts["codes"].view(E4M3), parts["scale"]
    return quantize_float8(format_.dequantize(parts, tuple(weight.shape), dtype), "row")


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, scaling_x, scaling_grad):
        ctx.weight, ctx.scaling_grad = weight, scaling_grad  # an attribute: see autograd.linear
        codes, scale = weight_codes(weight, input.dtype)
        x, inverse = scaling_x.cast(input.reshape(-1, input.shape[-1]))
        y = fp8_matmul(x, codes, inverse, scale, input.dtype, fast=True)
        y = y if bias is None else y.add_(bias)
        return y.view(*input.shape[:-1], codes.shape[0])

    @staticmethod
    def backward(ctx, grad):
        grad_input = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            codes, scale = weight_codes(ctx.weight, grad.dtype)
            per_row = scale.dim() > 0
            g, inverse = ctx.scaling_grad.cast(rows, scale if per_row else None)
            scale = torch.ones_like(inverse) if per_row else scale
            grad_input = fp8_matmul(g, transpose_float8(codes), inverse, scale, grad.dtype, fast=False)
            grad_input = grad_input.view(*grad.shape[:-1], codes.shape[1])
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_input, None, grad_bias, None, None


def fp8_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """`dtype` [M, N] = (a·bᵀ) · a_scale · b_scale.

    Args:
        a, b: FP8 [M, K] and [N, K], contiguous; b is E4M3, and a too where b has a scale a row.
        a_scale: fp32 [].
        b_scale: fp32 [] or [N].
        fast: let Hopper's tensor cores keep partial sums in fewer bits, which costs less; for forward products only.
    """
    if _has_product(a, b, b_scale):
        if b_scale.dim():
            a_scale, b_scale = a_scale.expand(a.shape[0], 1).contiguous(), b_scale.view(1, -1)
        product = torch._scaled_mm(
            a, b.t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
        return product.to(dtype)
    exact = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # fp16 would overflow: E5M2 reaches 57344
    product = a.to(exact) @ b.to(exact).t()
    return (product.float() * (a_scale * b_scale)).to(dtype)


def _has_product(a: Tensor, b: Tensor, b_scale: Tensor) -> bool:
    """Whether torch._scaled_mm takes these; if not, says why once."""
    needed = (9, 0) if b_scale.dim() else (8, 9)  # scales per row: Hopper and later
    if a.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(a.device) < needed:
        reason = f"{a.device.type} has no FP8 units that torch multiplies with"
    elif a.shape[1] % MULTIPLE or b.shape[0] % MULTIPLE:
        reason = f"{a.shape[1]} and {b.shape[0]} are not both multiples of {MULTIPLE}, as FP8 products need"
    else:
        return True
    notice(f"fp8-product-{a.device.type}", f"{reason}: FP8 codes are multiplied in 16 or 32 bits, with equal results")
    return False
