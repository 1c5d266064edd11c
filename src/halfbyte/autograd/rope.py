"""RoPE, and RMSNorm of q and k with RoPE, as differentiable functions.

A rotation is undone by the opposite one, so RoPE saves cos and sin only, and works in place both ways. The norm before
it is not undone by anything (weights may be zero): that function writes its results elsewhere and saves q and k; their
r is cheaper to compute again than to store.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import on_compiler
from ..ops import rope as ops
from .function import OnceFunction


def _writable(grad: Tensor) -> Tensor:
    """The gradient, or a copy where several of its elements share memory, as those of a sum's gradient do."""
    return grad.contiguous() if 0 in grad.stride() else grad


class _Rope(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        # Behind autograd's back (.data): it takes no mark_dirty for two results that are views, as transposed
        # projections are, and a raised version would make it rebuild the history of other views, such as a fused v.
        ops.rope_(q.data, k.data, cos, sin, False)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        grad_q, grad_k = _writable(grad_q), _writable(grad_k)
        ops.rope_(grad_q, grad_k, *ctx.saved_tensors, True)
        return grad_q, grad_k, None, None


class _QKNormRope(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps, offset):
        ctx.save_for_backward(q, k, cos, sin)
        ctx.weights, ctx.eps, ctx.offset = (q_weight, k_weight), eps, offset
        return ops.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, offset)

    @staticmethod
    def backward(ctx, grad_q, grad_k):
        q, k, cos, sin = ctx.saved_tensors
        grad_q, grad_k = _writable(grad_q), _writable(grad_k)
        need_weight = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        dws = ops.qk_norm_rope_backward_(grad_q, grad_k, q, k, *ctx.weights, cos, sin, ctx.eps, ctx.offset, need_weight)
        return grad_q, grad_k, *(dws or (None, None)), None, None, None, None


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k rotated by position, in place where autograd runs eagerly.

    Pass fresh results of projections or norms, whose values nothing has saved, and use only what it returns. Backward
    overwrites the gradients it is given, so what reads the result must not hand its own gradient on unchanged to others
    as well (an addition would; attention does not).

    Args:
        q: [B, Hq, T, D], last stride 1; fp32, fp16 or bf16 (fp64 on a CPU).
        k: [B, Hk, T, D] in q's dtype.
        cos, sin: [B or 1, T, R] as Hugging Face's rotary embeddings give them; with R < D the last D − R values pass.

    Raises:
        ModelError: an argument of the wrong dtype, shape or device, by name.
    """
    if on_compiler():
        ops.check_rope(q, k, cos, sin)
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
    return _Rope.apply(q, k, cos, sin)


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

    New tensors in the memory order of q and k. Backward overwrites the gradients it is given (see `rope`).

    Args:
        q, k: as in `rope`.
        q_weight, k_weight: [D].
        cos, sin: [B or 1, T, D].

    Raises:
        ModelError: an argument of the wrong dtype, shape or device, by name.
    """
    if on_compiler():
        return ops.qk_norm_rope.reference(q, k, q_weight, k_weight, cos, sin, eps, offset)
    return _QKNormRope.apply(q, k, q_weight, k_weight, cos, sin, eps, offset)
