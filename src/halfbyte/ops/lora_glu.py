"""A gated linear unit between projections with LoRA adapters, fused with the adapters' low-rank GEMMs.

With g₀ = x·Wᵀ of the gate projection without its adapter, u_g = x·Aᵀ of the adapter, and u₀, u_u of the up projection,

    g = g₀ + s·u_g·B_gᵀ      u = u₀ + s·u_u·B_uᵀ      h = a(g)·u      u_d = h·A_dᵀ

and backward, with v_d = s·dy·B_d of the down projection's adapter and dh₀ = dy·W_d,

    dh = dh₀ + v_d·A_d       dg, du as in `ops.glu`      dA_d = v_dᵀ·h
    v_g = s·dg·B_g           dB_g = s·dgᵀ·u_g            v_u, dB_u by the same formulas

Each of these eight GEMMs has one dimension of r: separately it is a pass over a tensor [M, I] for almost no arithmetic,
in addition to the two passes of the unit. At 8,192 tokens of an 8B model a pass reads 235 MB, 57 µs on an H200. In one
kernel the GEMMs cost only shared memory, backward does not write h, and g is rounded once less.

With dropout, the mask of the down projection's adapter (`ops.dropout`) is applied to h in u_d and dA_d, and to v_d·A_d.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from ..utils.errors import ModelError
from .dropout import Dropout, drop
from .fp8_scaling import Slot
from .glu import Activation, activation_and_derivative, check_glu


class Factors(NamedTuple):
    """Adapters of the three projections, in the dtype of the activations.

    b_gate, b_up: [I, r] of the gate and up projections; a_down: [r, I] of the down projection. Scales are α/r.
    dropout: mask of the down projection's adapter, or None.
    """

    b_gate: Tensor
    b_up: Tensor
    a_down: Tensor
    gate_scale: float
    up_scale: float
    dropout: Dropout | None = None


class Gradients(NamedTuple):
    v: Tensor  # [M, r_gate + r_up], in the dtype of the activations
    b_gate: Tensor  # fp32 [I, r_gate]
    b_up: Tensor  # fp32 [I, r_up]
    a_down: Tensor  # fp32 [r_down, I]


def check_lora_glu(gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: str) -> None:
    """Raise a ModelError that names the argument which does not fit."""
    check_glu(gate, up, activation)
    width, ranks = gate.shape[-1], (factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0])
    shapes = {
        "gate": (gate, (gate.numel() // max(width, 1), width)),
        "low": (low, (gate.shape[0], ranks[0] + ranks[1])),
        "b_gate": (factors.b_gate, (width, ranks[0])),
        "b_up": (factors.b_up, (width, ranks[1])),
        "a_down": (factors.a_down, (ranks[2], width)),
    }
    for name, (tensor, shape) in shapes.items():
        check_contiguous(name, tensor, shape, gate)


def check_contiguous(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless `tensor` is contiguous and has this shape and the dtype and device of `like`."""
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        actual = f"{list(tensor.shape)}{'' if tensor.is_contiguous() else ' with gaps'}"
        raise ModelError(f"lora_glu: {name} is {actual}", f"pass a contiguous tensor {list(shape)}")
    if tensor.dtype is not like.dtype or tensor.device != like.device:
        actual, expected = f"{tensor.dtype} on {tensor.device}", f"{like.dtype} on {like.device}"
        raise ModelError(f"lora_glu: {name} is {actual}, and gate {expected}", "give them one dtype and device")


def check_gradients(grad: Tensor, v_down: Tensor, gate: Tensor, factors: Factors) -> None:
    """Raise a ModelError that names the backward's argument that does not fit."""
    check_contiguous("grad", grad, tuple(gate.shape), gate)
    check_contiguous("v_down", v_down, (gate.shape[0], factors.a_down.shape[0]), gate)


def _completed(gate: Tensor, up: Tensor, low: Tensor, factors: Factors) -> tuple[Tensor, Tensor]:
    """g and u with their low-rank terms, in fp32 (fp64 for fp64)."""
    exact = torch.promote_types(gate.dtype, torch.float32)
    u_gate, u_up = low.to(exact).split((factors.b_gate.shape[1], factors.b_up.shape[1]), dim=1)
    g = gate.to(exact) + factors.gate_scale * (u_gate @ factors.b_gate.to(exact).t())
    u = up.to(exact) + factors.up_scale * (u_up @ factors.b_up.to(exact).t())
    return g, u


def _dropped(tensor: Tensor, factors: Factors) -> Tensor:
    return tensor if factors.dropout is None else drop(tensor, factors.dropout)


@op("triton.lora_glu")
def in_one_pass(x: Tensor, rank: int) -> bool:
    """Return whether x's device has kernels for adapters of up to this rank around tensors of x's dtype.

    Where it has none, separate GEMMs are faster: on a CPU, and where the factors do not fit in shared memory.
    """
    return False


@op("cuda.lora_glu", "triton.lora_glu")
def lora_glu(gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: Activation) -> tuple[Tensor, Tensor]:
    """h and u_d of the module's formulas.

    Args:
        gate, up: g₀ and u₀ [M, I], contiguous; fp32, fp16 or bf16.
        low: [u_g, u_u] [M, r_gate + r_up], in gate's dtype.
        activation: as in `ops.glu.glu`.

    Returns:
        h [M, I] and u_d [M, r_down], in gate's dtype.
    """
    check_lora_glu(gate, up, low, factors, activation)
    g, u = _completed(gate, up, low, factors)
    hidden = (activation_and_derivative(g, activation)[0] * u).to(gate.dtype)
    return hidden, _dropped(hidden, factors) @ factors.a_down.t()


@op("cuda.lora_glu", "triton.lora_glu")
def lora_glu_backward_(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: Activation
) -> Gradients:
    """Gradients of `lora_glu`; `gate` and `up` become dg and du in place.

    Args:
        grad: dh₀ [M, I], in the dtype of gate.
        gate, up, low: the forward's inputs.
        v_down: v_d [M, r_down].
    """
    check_lora_glu(gate, up, low, factors, activation)
    check_gradients(grad, v_down, gate, factors)
    exact = torch.promote_types(gate.dtype, torch.float32)
    g, u = _completed(gate, up, low, factors)
    dh = grad.to(exact) + _dropped(v_down.to(exact) @ factors.a_down.to(exact), factors)
    activated, derivative = activation_and_derivative(g, activation)
    hidden = (activated * u).to(gate.dtype)
    gate.copy_(dh * u * derivative)
    up.copy_(dh * activated)
    u_gate, u_up = low.split((factors.b_gate.shape[1], factors.b_up.shape[1]), dim=1)
    v = torch.cat([gate * factors.gate_scale @ factors.b_gate, up * factors.up_scale @ factors.b_up], dim=1)
    b_gate = (gate.t() @ u_gate).to(exact) * factors.gate_scale
    b_up = (up.t() @ u_up).to(exact) * factors.up_scale
    return Gradients(v, b_gate, b_up, (v_down.t() @ _dropped(hidden, factors)).to(exact))


@op("cuda.lora_glu", "triton.lora_glu")
def lora_glu_float8(
    gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: Activation, slot: Slot
) -> tuple[Tensor, Tensor]:
    """`lora_glu` with h in FP8 only, cast with the settled scale of `slot`, which records its amax."""
    hidden, u_down = lora_glu.reference(gate, up, low, factors, activation)
    return slot.cast(hidden).values, u_down


@op("cuda.lora_glu", "triton.lora_glu")
def lora_glu_backward_float8(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    low: Tensor,
    v_down: Tensor,
    factors: Factors,
    activation: Activation,
    slot: Slot,
    columns: Tensor | None,
) -> tuple[Gradients, Tensor]:
    """`lora_glu_backward_` with dg and du concatenated in FP8 [M, 2·I]; gate and up do not change.

    Args:
        slot: casts dg and du; settled.
        columns: fp32 [2·I], multiplied into dg and du before the cast, or None.
    """
    gate, up = gate.clone(), up.clone()
    gradients = lora_glu_backward_.reference(grad, gate, up, low, v_down, factors, activation)
    return gradients, slot.cast(gate, up, factors=columns).values
