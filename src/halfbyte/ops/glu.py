"""Gated linear units: the specification of SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202), forward and backward.

    h = a(g) · u        ∂L/∂g = ∂L/∂h · u · a′(g)        ∂L/∂u = ∂L/∂h · a(g)

    silu       a = g·σ(g)                     a′ = σ(g) · (1 + g·(1 − σ(g)))
    gelu       a = g·Φ(g)                     a′ = Φ(g) + g·φ(g)
    gelu_tanh  a = g·σ(2z)                    a′ = σ(2z) · (1 + g·2z′·(1 − σ(2z)))
               z = √(2/π)·(g + 0.044715 g³)   z′ = √(2/π)·(1 + 0.134145 g²)

since (1 + tanh z)/2 = σ(2z): each needs one exponential. Arithmetic is fp32 (fp64 for fp64 input), rounded once.

Backward is the last use of g and u, so the gradients overwrite them: at 8,192 tokens of an 8B model each of these
tensors is 224 MiB. The same pass can recompute h, so the backward of a LoRA adapter on down_proj, which reads h, does
not save it.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .checks import check_float, check_same

Activation = Literal["silu", "gelu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


def check_glu(gate: Tensor, up: Tensor, activation: str) -> None:
    """Raise a ModelError that names the argument that does not fit."""
    check_float("glu", "gate", gate)
    check_same("glu", "up", up, "gate", gate)
    if activation not in ACTIVATIONS:
        raise ModelError(f"glu: activation is {activation!r}", f"use one of {', '.join(ACTIVATIONS)}")


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """a(g), in gate's dtype."""
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="none" if activation == "gelu" else "tanh")


def activation_and_derivative(gate: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    if activation == "gelu":
        cdf = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
        density = torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
        return gate * cdf, cdf + gate * density
    if activation == "silu":
        sigmoid = torch.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    sigmoid = torch.sigmoid(2 * SQRT_2_OVER_PI * gate * (1 + 0.044715 * gate * gate))
    slope = 2 * SQRT_2_OVER_PI * (1 + 3 * 0.044715 * gate * gate)
    return gate * sigmoid, sigmoid * (1 + gate * slope * (1 - sigmoid))


@op("triton.glu", "native.glu")
def glu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """a(gate) · up, contiguous.

    Args:
        gate, up: of one shape and dtype; fp32, fp16 or bf16. They may be the two halves of a fused projection.
        activation: "silu", "gelu" or "gelu_tanh" (Hugging Face's "gelu_pytorch_tanh").
    """
    check_glu(gate, up, activation)
    exact = torch.promote_types(gate.dtype, torch.float32)
    return (activate(gate.to(exact), activation) * up.to(exact)).to(gate.dtype).contiguous()


@op("triton.glu", "native.glu")
def glu_backward_(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, need_output: bool) -> None:
    """Gradients of `glu`, in place: `gate` and `up` become their gradients.

    Args:
        grad: gradient of h, in the shape and dtype of gate; becomes h with `need_output`.
        gate, up: the forward's inputs.
        need_output: also recompute h, into `grad`.
    """
    check_glu(gate, up, activation)
    check_same("glu_backward", "grad", grad, "gate", gate)
    exact = torch.promote_types(gate.dtype, torch.float32)
    activated, derivative = activation_and_derivative(gate.to(exact), activation)
    output = activated * up if need_output else None  # before up is overwritten
    gate.copy_(grad.to(exact) * up * derivative)
    up.copy_(grad * activated)
    if output is not None:
        grad.copy_(output)
