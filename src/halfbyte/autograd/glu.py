"""SwiGLU and GeGLU as one differentiable function that saves nothing of its own: its inputs become their gradients."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import on_compiler
from ..ops import glu as ops
from .function import OnceFunction


class _GLU(OnceFunction):
    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.glu(gate, up, activation)

    @staticmethod
    def backward(ctx, grad):
        gate, up = (saved.detach() for saved in ctx.saved_tensors)
        ops.glu_backward_(grad, gate, up, ctx.activation, False)
        return gate if ctx.needs_input_grad[0] else None, up if ctx.needs_input_grad[1] else None, None


def glu(gate: Tensor, up: Tensor, activation: ops.Activation = "silu") -> Tensor:
    """activation(gate) · up, in fp32 inside, rounded once.

    Backward overwrites gate and up with their gradients: pass results of projections, whose values nothing else keeps.
    A second backward, or another function that saved them, gets autograd's error about in-place changes.

    Args:
        gate, up: one shape and dtype; fp32, fp16 or bf16 (fp64 on a CPU). Halves of a fused projection are fine.
        activation: "silu", "gelu" or "gelu_tanh" (Hugging Face's "gelu_pytorch_tanh").

    Raises:
        ModelError: an argument of the wrong dtype, shape or device, by name.
    """
    if on_compiler():
        return ops.glu.reference(gate, up, activation)
    return _GLU.apply(gate, up, activation)
