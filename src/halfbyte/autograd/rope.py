"""RoPE, and RMSNorm of q and k with RoPE, as differentiable functions.

The inverse of a rotation is the opposite rotation, so RoPE saves only cos and sin and works in place in both passes.
With DoRA it also saves the rotated q and k, which attention saves anyway: the magnitudes' gradients read them.
The norm is not invertible (weights may be zero), so the function with norms writes new tensors and saves q and k. It
recomputes their reciprocal RMS, which is cheaper than storing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import on_compiler
from ..ops import rope as ops
from ..ops.dora import column_dots
from .dora import Scale, magnitude_gradient
from .function import OnceFunction


def _writable(grad: Tensor) -> Tensor:
    """The gradient, or a copy if it is an expanded tensor, such as the gradient of a sum."""
    return grad.contiguous() if 0 in grad.stride() else grad


class _Rope(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin, *scales):
        # .data hides the change from autograd: mark_dirty does not support several outputs that are views (transposed
        # projections), and a version bump would rebuild the history of other views of the same base (a fused v).
        ops.rope_(q.data, k.data, cos, sin, False)
        ctx.save_for_backward(cos, sin, *((q, k, *scales) if scales else ()))  # attention saves q and k, too
        return q, k

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        grad_q, grad_k = _writable(grad_q), _writable(grad_k)
        cos, sin, *saved = ctx.saved_tensors
        ops.rope_(grad_q, grad_k, cos, sin, True)
        if not saved:
            return grad_q, grad_k, None, None
        q, k, *scales = saved
        values = _before_rotation(q, k, cos, sin)
        gradients = [
            None if magnitude is None else magnitude_gradient(column_dots(grad, value), grad, bias, magnitude)
            for grad, value, magnitude, bias in zip(
                map(_rows, (grad_q, grad_k)), map(_rows, values), scales[::2], scales[1::2], strict=True
            )
        ]
        return grad_q, grad_k, None, None, gradients[0], None, gradients[1], None


def _before_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k before their rotation by cos and sin, new tensors.

    The inverse of a rotation is its transpose over its determinant, which is not 1 where cos and sin are rounded to 16
    bits, or scaled (YaRN).
    """
    exact, half = torch.promote_types(cos.dtype, torch.float32), cos.shape[-1] // 2
    cos, sin = cos.to(exact), sin.to(exact)
    other_cos, other_sin = cos.roll(half, -1), sin.roll(half, -1)
    determinant = cos * other_cos + sin * other_sin
    q, k = q.clone(), k.clone()
    ops.rope_(q, k, other_cos / determinant, other_sin / determinant, True)
    return q, k


def _rows(x: Tensor) -> Tensor:
    """[B, H, T, D] as [B·T, H·D]."""
    return x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], x.shape[1] * x.shape[3])


class _QKNormRope(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, offset):
        ctx.save_for_backward(q, k, cos, sin)
        ctx.weights = (q_weight, k_weight)
        ctx.eps = eps
        ctx.offset = offset
        return ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        q, k, cos, sin = ctx.saved_tensors
        grad_q, grad_k = _writable(grad_q), _writable(grad_k)
        need_weight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dws = ops.qk_norm_rope_backward_(grad_q, grad_k, q, k, *ctx.weights, cos, sin, ctx.eps, ctx.offset, need_weight)
        return grad_q, grad_k, *(dws or (None, None)), None, None, None, None


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, scales: Sequence[Scale | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by position: in place in eager mode, to new tensors under torch.compile.

    Pass outputs of projections or norms that nothing else has saved, and use only the returned tensors. The backward
    overwrites its incoming gradients. So the operation that reads the result must not pass its gradient unchanged to
    other inputs as well, as an addition does and attention does not.

    Args:
        q: [B, Hq, T, D], last stride 1; fp32, fp16 or bf16 (fp64 on a CPU).
        k: [B, Hk, T, D] in q's dtype.
        cos, sin: [B or 1, T, R] from Hugging Face's rotary embeddings; if R < D, the last D − R values do not change.
        scales: DoRA's of the projections that returned q and k for the use "deferred" (`autograd.lora`), else None. The
            magnitudes get their gradients here, from q and k rotated back: in 16 bits these are rounded once more.

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
    """
    if on_compiler():
        ops.check_rope(q, k, cos, sin)
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    if scales[0] is None and scales[1] is None:
        return _Rope.apply(q, k, cos, sin)
    flat = [part for scale in scales for part in scale or (None, None)]
    return _Rope.apply(q, k, cos, sin, *flat)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """RMSNorm over each head of q and k, then RoPE, as in Qwen3 (and, with `offset`, Gemma 3).

    Returns new tensors in the memory order of q and k. The backward overwrites its incoming gradients (see `rope`).

    Args:
        q, k: as in `rope`.
        q_weight, k_weight: [D].
        cos, sin: [B or 1, T, D].

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
    """
    if on_compiler():
        return ops.qk_norm_rope.reference(q, k, q_weight, k_weight, cos, sin, eps, offset)
    return _QKNormRope.apply(q, k, q_weight, k_weight, cos, sin, eps, offset)
