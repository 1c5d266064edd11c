"""RMSNorm and LayerNorm: the specification, forward and backward.

For a row x of D values, with r = 1/√(mean(x²) + ε) and x̂ = r·x (Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4):

    Llama:  y = w · x̂     x̂ rounded to x's dtype first; y has the promoted dtype of x and w
    Gemma:  y = (1 + w) · x̂     all in fp32; y has x's dtype

With g = ∂L/∂y and h = w·g (or (1 + w)·g), backward is

    ∂L/∂x = r · (h − x̂ · mean(h·x̂))      ∂L/∂w = Σ_rows g·x̂

so it needs only x and r. LayerNorm (Ba et al. 2016, arXiv:1607.06450) subtracts the mean μ first, x̂ = r·(x − μ), and
∂L/∂x = r · (h − mean(h) − x̂ · mean(h·x̂)), ∂L/∂b = Σ_rows g.

Arithmetic is fp32 (fp64 for fp64 input). The residual sum is fused: forward normalises x + residual, and backward adds
the residual stream's gradient to the norm's; both sums cost no extra pass in a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from .checks import check_float, check_rows, check_same, check_vector
from .fp8_scaling import Slot


def check_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    """Raise a ModelError that names the argument that does not fit."""
    check_float("rms_norm", "x", x)
    check_vector("rms_norm", "weight", weight, x.shape[-1], x)
    if residual is not None:
        check_same("rms_norm", "residual", residual, "x", x)


def check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Raise a ModelError that names the argument that does not fit."""
    check_float("layer_norm", "x", x)
    check_vector("layer_norm", "weight", weight, x.shape[-1], x)
    check_vector("layer_norm", "bias", bias, x.shape[-1], x)


def normed_dtype(x: Tensor, weight: Tensor, offset: bool) -> torch.dtype:
    """Dtype of y: x's for Gemma; the promoted dtype of x and w for Llama, so an fp32 weight gives an fp32 result."""
    return x.dtype if offset or x.dtype is weight.dtype else torch.promote_types(x.dtype, weight.dtype)


def _exact(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@op("triton.norms")
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of x, or of x + residual.

    Args:
        x: [..., D]; fp32, fp16 or bf16.
        residual: x's shape and dtype, or None.
        weight: [D].
        eps: added to the mean square.
        offset: multiply by 1 + weight in fp32 (Gemma) instead of rounding x̂ and multiplying by weight (Llama).

    Returns:
        y [..., D]; the sum x + residual [..., D] in x's dtype, which is x itself without a residual; r fp32 [...].
    """
    check_rms_norm(x, residual, weight)
    total = x if residual is None else x + residual
    exact = total.to(_exact(x))
    rstd = torch.rsqrt(exact.pow(2).mean(-1) + eps)
    normal = exact * rstd.unsqueeze(-1)
    y = (normal * (1.0 + weight.to(exact.dtype))).to(x.dtype) if offset else weight * normal.to(x.dtype)
    return y, total, rstd


@op("triton.norms")
def rms_norm_float8(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool, slot: Slot
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rms_norm`, and y also in FP8 [..., D], cast with the settled scale of `slot`, which records its amax."""
    y, total, rstd = rms_norm.reference(x, residual, weight, eps, offset)
    return y, total, rstd, slot.cast(y.reshape(-1, y.shape[-1])).values.view(y.shape)


@op("triton.norms")
def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    offset: bool,
    residual_grad: Tensor | None,
    need_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `rms_norm`.

    Args:
        grad: [..., D] gradient of y, in y's dtype.
        x: [..., D] the normalised tensor (the sum, if there was a residual).
        weight, rstd, offset: as in the forward.
        residual_grad: [..., D] gradient of the sum from the residual stream, in x's dtype, or None.
        need_weight: also return the weight's gradient.

    Returns:
        gradient of x [..., D] in x's dtype, `residual_grad` included; gradient of weight [D] in its dtype, or None.
    """
    check_rows("rms_norm_backward", grad, x, rstd, residual_grad)
    grad_exact = grad.to(_exact(x))
    normal = x.to(grad_exact.dtype) * rstd.unsqueeze(-1)
    scaled = grad_exact * (weight.to(grad_exact.dtype) + (1.0 if offset else 0.0))
    dx = (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if residual_grad is not None:
        dx = dx + residual_grad
    dw = (grad_exact * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype) if need_weight else None
    return dx.to(x.dtype), dw


@op("triton.norms")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension.

    Args:
        x: [..., D]; fp32, fp16 or bf16.
        weight, bias: [D].
        eps: added to the variance.

    Returns:
        y [..., D] in x's dtype; mean and 1/√(variance + ε), both fp32 [...].
    """
    check_layer_norm(x, weight, bias)
    exact = x.to(_exact(x))
    mean = exact.mean(-1)
    centred = exact - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.pow(2).mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1) * weight.to(exact.dtype) + bias.to(exact.dtype)
    return y.to(x.dtype), mean, rstd


@op("triton.norms")
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `layer_norm`: x [..., D]; weight and bias [D], both in weight's dtype, or None.

    Args:
        grad: [..., D] gradient of y, in x's dtype.
        x, weight, mean, rstd: as in the forward.
        need_weight: also return the gradients of weight and bias.
    """
    check_rows("layer_norm_backward", grad, x, rstd, None)
    grad_exact = grad.to(_exact(x))
    normal = (x.to(grad_exact.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    scaled = grad_exact * weight.to(grad_exact.dtype)
    centred = scaled - scaled.mean(-1, keepdim=True)
    dx = (centred - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    if not need_weight:
        return dx.to(x.dtype), None, None
    dw = (grad_exact * normal).reshape(-1, x.shape[-1]).sum(0)
    db = grad_exact.reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)


@op("triton.norms")
def sum_rows(partials: Tensor, dtype: torch.dtype, first: int | None = None) -> Tensor:
    """Sum the rows of a gradient's partial sums, fp32 [R, D], to [1, D] in `dtype`; kernels write a few rows of them.

    With `first`, return [2, D]: the sum of the first `first` rows, and the sum of the others.
    """
    sections = [partials] if first is None else [partials[:first], partials[first:]]
    return torch.stack([section.sum(0) for section in sections]).to(dtype)
