"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864, section 3.4.2) in Hugging Face's layout, optionally
after an RMSNorm of q and k: the specification, forward and backward.

The first R of a head's D values are rotated, in pairs (i, i + R/2):

    y₁ = x₁·cos₁ − x₂·sin₁        y₂ = x₂·cos₂ + x₁·sin₂

The others do not change (R < D: partial rotary). Backward is the transposed rotation: the same formula with −sin, its
halves exchanged. R is the width of cos and sin, which contain the positions, so packed documents need nothing more.

q and k are [B, H, T, D] with any strides: models create them as [B, T, H, D] and transpose. Both share one cos and one
sin per token, hence one launch. The rotation is invertible, so it runs in place; the norm's backward needs its input,
so the fused op writes new tensors. Arithmetic is fp32 (fp64 for fp64 input), rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .checks import check_float, check_same, check_vector


def check_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise a ModelError that names the argument that does not fit."""
    check_float("rope", "q", q)
    check_float("rope", "cos", cos)
    if q.dim() != 4:
        raise ModelError(f"rope: q is {list(q.shape)}", "pass [batch, heads, tokens, head size]")
    batch, _, tokens, size = q.shape
    if k.dim() != 4 or (k.shape[0], k.shape[2], k.shape[3]) != (batch, tokens, size):
        raise ModelError(f"rope: k is {list(k.shape)}, and q is {list(q.shape)}", "they may differ in heads only")
    if k.dtype is not q.dtype or k.device != q.device:
        raise ModelError(f"rope: k is {k.dtype} on {k.device}, and q {q.dtype} on {q.device}")
    if cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != tokens or cos.device != q.device:
        raise ModelError(f"rope: cos is {list(cos.shape)} on {cos.device}, and q is {list(q.shape)} on {q.device}",
                         "pass [batch or 1, tokens, rotated size]")  # fmt: skip
    if cos.shape[2] > size or cos.shape[2] % 2:
        raise ModelError(f"rope: cos has {cos.shape[2]} values a token", f"an even number up to {size} can be rotated")
    if sin.shape != cos.shape or sin.dtype is not cos.dtype or sin.device != cos.device:
        raise ModelError(f"rope: sin is {sin.dtype} {list(sin.shape)}, and cos is {cos.dtype} {list(cos.shape)}")


def check_qk_norm_rope(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`check_rope`, and check the norms' weights; only fully rotated heads are supported."""
    check_rope(q, k, cos, sin)
    check_vector("qk_norm_rope", "q_weight", q_weight, q.shape[-1], q)
    check_vector("qk_norm_rope", "k_weight", k_weight, q.shape[-1], q)
    if cos.shape[2] != q.shape[3]:
        raise ModelError(f"qk_norm_rope: cos has {cos.shape[2]} values a token, and heads have {q.shape[3]}",
                         "use rms_norm and rope where a head is rotated in part")  # fmt: skip


def halves(x: Tensor, size: int) -> Tensor:
    """Reorder the first `size` of x's values [..., D] from adjacent pairs to this module's half-split layout.

    Returns a new tensor: the first value of each pair, then the second ones, then the rest."""
    rotated = x[..., :size].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, H, T, D] into a new tensor of x's dtype; cos and sin [B or 1, T, R]."""
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(exact).unsqueeze(1), sin.to(exact).unsqueeze(1)
    rotated, unrotated = x[..., : cos.shape[-1]].to(exact), x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated.to(x.dtype), unrotated], dim=-1)


def _transposed(sin: Tensor) -> Tensor:
    """sin of the transposed rotation: negative, halves exchanged."""
    return -sin.roll(sin.shape[-1] // 2, dims=-1)


@op("triton.rope")
def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> None:
    """Rotate q and k in place.

    Args:
        q: [B, Hq, T, D]; fp32, fp16 or bf16.
        k: [B, Hk, T, D] in q's dtype.
        cos, sin: [B or 1, T, R], R ≤ D even, any float dtype.
        backward: apply the transpose to the gradients of the rotated q and k.
    """
    check_rope(q, k, cos, sin)
    sin = _transposed(sin) if backward else sin
    q.copy_(rotate(q, cos, sin))
    k.copy_(rotate(k, cos, sin))


def normed(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x̂, r and the factor of RMSNorm over the last dimension, in fp32 (fp64); the norm is x̂ · factor."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    return exact * rstd, rstd, weight.to(exact.dtype) + (1.0 if offset else 0.0)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: bool) -> Tensor:
    """`rotate(rms_norm(x))` without intermediate rounding."""
    normal, _, factor = normed(x, weight, eps, offset)
    return rotate(normal * factor, cos, sin).to(x.dtype)


@op("triton.rope")
def qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float, offset: bool
) -> tuple[Tensor, Tensor]:
    """RMSNorm over each head of q and k (Qwen3, Gemma 3), then RoPE; new tensors in the memory order of q and k.

    Args:
        q: [B, Hq, T, D]; fp32, fp16 or bf16.
        k: [B, Hk, T, D] in q's dtype.
        q_weight, k_weight: [D].
        cos, sin: [B or 1, T, D], any float dtype.
        eps: added to the mean squares.
        offset: multiply by 1 + weight (Gemma).
    """
    check_qk_norm_rope(q, k, q_weight, k_weight, cos, sin)
    rotated = (norm_rotate(q, q_weight, cos, sin, eps, offset), norm_rotate(k, k_weight, cos, sin, eps, offset))
    return torch.empty_like(q).copy_(rotated[0]), torch.empty_like(k).copy_(rotated[1])


@op("triton.rope")
def qk_norm_rope_backward_(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    offset: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor] | None:
    """Gradients of `qk_norm_rope`; the gradients of q and k overwrite `grad_q` and `grad_k`.

    Args:
        grad_q, grad_k: gradients of the results, in their shapes and dtype.
        q, k, q_weight, k_weight, cos, sin, eps, offset: as in the forward.
        need_weight: also return the gradients of q_weight and k_weight, each [D] in its dtype.
    """
    check_qk_norm_rope(q, k, q_weight, k_weight, cos, sin)
    check_same("qk_norm_rope_backward", "grad_q", grad_q, "q", q)
    check_same("qk_norm_rope_backward", "grad_k", grad_k, "k", k)
    dws = []
    for grad, x, weight in ((grad_q, q, q_weight), (grad_k, k, k_weight)):
        normal, rstd, factor = normed(x, weight, eps, offset)
        back = rotate(grad.to(normal.dtype), cos, _transposed(sin))
        scaled = back * factor
        grad.copy_((scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd)
        if need_weight:
            dws.append((back * normal).sum((0, 1, 2)).to(weight.dtype))
    return (dws[0], dws[1]) if need_weight else None
