"""RoPE, and RMSNorm of q and k with RoPE, as differentiable functions.

The inverse of a rotation is the opposite rotation, so RoPE saves only cos and sin and works in place in both passes.
The norm is not invertible (weights may be zero), so the function with norms writes new tensors and saves q and k. It
recomputes their reciprocal RMS, which is cheaper than storing it.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import on_compiler
from ..ops import rope as ops
from .function import OnceFunction


def _writable(grad: Tensor) -> Tensor:
    """The gradient, or a copy if it is an expanded tensor, such as the gradient of a sum."""
    return grad.contiguous() if 0 in grad.stride() else grad


class _Rope(OnceFunction):
    @staticmethod
    def forward(ctx, q, k, cos, sin):
        # .data hides the change from autograd: mark_dirty does not support several outputs that are views (transposed
        # projections), and a version bump would rebuild the history of other views of the same base (a fused v).
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


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k by position: in place in eager mode, to new tensors under torch.compile.

    Pass outputs of projections or norms that nothing else has saved, and use only the returned tensors. The backward
    overwrites its incoming gradients. So the operation that reads the result must not pass its gradient unchanged to
    other inputs as well, as an addition does and attention does not.

    Args:
        q: [B, Hq, T, D], last stride 1; fp32, fp16 or bf16 (fp64 on a CPU).
        k: [B, Hk, T, D] in q's dtype.
        cos, sin: [B or 1, T, R] from Hugging Face's rotary embeddings; if R < D, the last D − R values do not change.

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
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
