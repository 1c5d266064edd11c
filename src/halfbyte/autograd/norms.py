"""RMSNorm and LayerNorm as differentiable functions that save x and one or two fp32 numbers per row.

Under torch.compile they use the torch reference, which Inductor fuses with the surrounding operations. An opaque kernel
would prevent this fusion. `autograd.rope` and `autograd.lora_mlp.glu` do the same.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import on_compiler
from ..ops import norms as ops
from .function import OnceFunction
from .linear_fp8 import Fp8Gemms


class _RMSNorm(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        y, _, rstd = ops.rms_norm(x, None, weight, eps, offset)
        ctx.save_for_backward(x, rstd)
        # Attributes, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.weight, ctx.offset = weight, offset
        return y

    @staticmethod
    def backward(ctx, grad):
        x, rstd = ctx.saved_tensors
        dx, dw = ops.rms_norm_backward(grad, x, ctx.weight, rstd, ctx.offset, None, ctx.needs_input_grad[1])
        return dx, dw, None, None


class _AddRMSNorm(OnceFunction):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, recipe):
        if recipe is not None and recipe.x.settled:
            y, total, rstd, codes = ops.rms_norm_float8(x, residual, weight, eps, offset, recipe.x)
            recipe.hand_over(y, codes)
        else:
            y, total, rstd = ops.rms_norm(x, residual, weight, eps, offset)
        ctx.save_for_backward(total, rstd)
        ctx.weight = weight
        ctx.offset = offset
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, grad, grad_total):
        dx, dw = grad_total, None
        if grad is not None:
            total, rstd = ctx.saved_tensors
            need_weight = ctx.needs_input_grad[2]
            dx, dw = ops.rms_norm_backward(grad, total, ctx.weight, rstd, ctx.offset, grad_total, need_weight)
        return dx, dx if ctx.added else None, dw, None, None, None


class _LayerNorm(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = ops.layer_norm(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias_dtype = weight, bias.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        x, mean, rstd = ctx.saved_tensors
        need_weight = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, dw, db = ops.layer_norm_backward(grad, x, ctx.weight, mean, rstd, need_weight)
        return dx, dw, None if db is None else db.to(ctx.bias_dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: bool = False) -> Tensor:
    """RMSNorm over the last dimension, with the roundings of Hugging Face's LlamaRMSNorm or GemmaRMSNorm.

    Args:
        x: [..., D]; fp32, fp16 or bf16 (fp64 on a CPU).
        weight: [D].
        offset: multiply by 1 + weight, as in Gemma.

    Returns:
        [..., D] in x's dtype; without `offset`, in the dtype that x and weight promote to.

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
    """
    if on_compiler():
        return ops.rms_norm.reference(x, None, weight, eps, offset)[0]
    return _RMSNorm.apply(x, weight, eps, offset)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float = 1e-6,
    offset: bool = False,
    recipe: Fp8Gemms | None = None,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(x + residual), x + residual); the sum continues the residual stream.

    In the backward one kernel adds the gradients of both results. With `residual` None the sum is x itself, and the
    residual branch needs no separate addition of gradients.

    Args:
        x, weight, eps, offset: as in `rms_norm`.
        residual: of x's shape and dtype, or None.
        recipe: FP8 recipe that also receives the norm in FP8, once it has a scale, so that its GEMMs need not cast it.

    Raises:
        ModelError: see `rms_norm`.
    """
    if on_compiler():
        return ops.rms_norm.reference(x, residual, weight, eps, offset)[:2]
    return _AddRMSNorm.apply(x, residual, weight, eps, offset, recipe)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension of x [..., D], in x's dtype; weight and bias are [D].

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
    """
    if on_compiler():
        return ops.layer_norm.reference(x, weight, bias, eps)[0]
    return _LayerNorm.apply(x, weight, bias, eps)
