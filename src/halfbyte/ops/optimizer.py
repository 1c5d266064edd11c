"""Optimizer steps over lists of parameters: rules, rounding of weights, and the ops of a step, as torch functions.

A step has up to four parts, each of one or two launches on a GPU for all parameters: `gradient_norm` (only if gradients
are clipped), `prepare_step`, which counts the step and computes each parameter's coefficients on the device,
`scale_by_trust` (only for LAMB, LARS and clipped updates), and `update_parameters`. Nothing is read on the host, so a
CUDA graph can hold the step.

Rules treat each element separately. In their docstrings p is the weight, g the gradient, and s1, s2, … are the states.
LAMB is AdamW, and LARS is SGD with momentum, with coefficients that `scale_by_trust` has multiplied by the trust ratio
of each parameter. So they have the storages, roundings and update kernels of these rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import op
from .optimizer_state import STORAGES

# Columns of the settings of a parameter group, fp64.
SETTINGS = ("lr", "weight_decay", "beta1", "beta2", "beta3", "eps", "alpha", "t_alpha", "t_beta3")


class Coefficients(NamedTuple):
    """Numbers that a rule reads, computed by `prepare_step` in fp64 for each parameter and rounded to fp32.

    Attributes:
        scale: factor of the gradient.
        decay: lr·weight_decay for rules with decoupled weight decay, otherwise weight_decay.
        rate: step size, the bias correction of the first moment included.
        root: 1 / sqrt(bias correction of the second moment).
        eps, alpha: as configured; AdEMAMix's alpha as scheduled. Trust ratios have their factor in alpha.
        beta1, rest1, beta2, rest2, beta3, rest3: decay rates of the moments, and 1 minus each.
        first: 1 / bias correction of the first moment, for AdEMAMix.
    """

    scale: Any
    decay: Any
    rate: Any
    root: Any
    eps: Any
    alpha: Any
    beta1: Any
    rest1: Any
    beta2: Any
    rest2: Any
    beta3: Any
    rest3: Any
    first: Any


BASIC = ("fp32", "bf16", "dynamic8")  # storages that every rule takes
Update = Callable[[Tensor, Tensor, Sequence[Tensor], Coefficients], tuple[Tensor, list[Tensor]]]


@dataclass(frozen=True)
class Rule:
    """One optimizer's arithmetic.

    Attributes:
        update: (p, g, states, coefficients) → the new p and states; fp32 [n] each, g is scaled already.
        states: names of the states, as in torch's optimizer, or bitsandbytes' order where torch has none.
        signed: of each state, whether its codes have a sign. The only state of a rule has, as in bitsandbytes.
        squares: of each state, whether it is a second moment.
        storages: names of the storages that the state can have.
        decoupled: whether weight decay shrinks the weight; otherwise it is added to the gradient.
        corrects_bias: whether `Coefficients.rate` and `root` contain Adam's bias correction.
    """

    update: Update
    states: tuple[str, ...]
    signed: tuple[bool, ...]
    squares: tuple[bool, ...]
    storages: tuple[str, ...] = BASIC
    decoupled: bool = True
    corrects_bias: bool = False


def _adamw(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), in the order of torch's fused kernel."""
    p = p - c.decay * p
    m = c.beta1 * s[0] + c.rest1 * g
    v = c.beta2 * s[1] + c.rest2 * g * g
    return p - c.rate * m / (v.sqrt() * c.root + c.eps), [m, v]


def _ademamix(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """AdEMAMix (Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1); s1 is the fast moment, s2 the slow one."""
    p = p - c.decay * p
    fast = c.beta1 * s[0] + c.rest1 * g
    slow = c.beta3 * s[1] + c.rest3 * g
    v = c.beta2 * s[2] + c.rest2 * g * g
    return p - c.rate * (fast * c.first + c.alpha * slow) / (v.sqrt() * c.root + c.eps), [fast, slow, v]


def _lion(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""
    p = p - c.decay * p
    direction = (c.beta1 * s[0] + c.rest1 * g).sign()
    return p - c.rate * direction, [c.beta2 * s[0] + c.rest2 * g]


def _momentum(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """SGD with momentum beta1, as torch's without dampening."""
    m = c.beta1 * s[0] + (g + c.decay * p)
    return p - c.rate * m, [m]


def _rmsprop(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """RMSprop (Tieleman & Hinton 2012) with the smoothing constant beta1, as torch's."""
    g = g + c.decay * p
    v = c.beta1 * s[0] + c.rest1 * g * g
    return p - c.rate * g / (v.sqrt() + c.eps), [v]


def _adagrad(p: Tensor, g: Tensor, s: Sequence[Tensor], c: Coefficients) -> tuple[Tensor, list[Tensor]]:
    """Adagrad (Duchi et al. 2011), as torch's without a decay of the learning rate."""
    g = g + c.decay * p
    v = s[0] + g * g
    return p - c.rate * g / (v.sqrt() + c.eps), [v]


RULES: dict[str, Rule] = {
    "adamw": Rule(_adamw, ("exp_avg", "exp_avg_sq"), (True, False), (False, True), tuple(STORAGES), corrects_bias=True),
    "ademamix": Rule(
        _ademamix,
        ("exp_avg", "exp_avg_slow", "exp_avg_sq"),
        (True, True, False),
        (False, False, True),
        corrects_bias=True,
    ),
    "lion": Rule(_lion, ("exp_avg",), (True,), (False,), (*BASIC, "companded8")),
    "momentum": Rule(_momentum, ("momentum_buffer",), (True,), (False,), (*BASIC, "companded8"), decoupled=False),
    "rmsprop": Rule(_rmsprop, ("square_avg",), (True,), (True,), decoupled=False),
    "adagrad": Rule(_adagrad, ("sum",), (True,), (True,), decoupled=False),
}

# How a weight of 16 bits is rounded: to the nearest, stochastically, or with the rounded part in an integer.
ROUNDINGS = ("nearest", "stochastic", "correction8", "correction16")


@dataclass(eq=False)
class Parameters:
    """Parameters that one launch updates: of one rule, storage, rounding, dtype of weights and dtype of gradients.

    Attributes:
        rows: int32 [n]: the row of each parameter in the coefficients.
        states: codes and scales of each state of each parameter; None for scales that the storage does not have.
        corrections: int8 or int16 tensors of the parameters' sizes with rounding "correction8" or "correction16".
        draws: with rounding "stochastic", the parameter's number in its optimizer, and the number of the first element
            in the full parameter, of which there may be a slice.
        version: increases when a weight or a gradient is another tensor than before.
        launch: what a kernel computes once from shapes, and once per version from addresses.
    """

    rule: str
    storage: str
    rounding: str
    rows: Tensor
    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[list[tuple[Tensor, Tensor | None]]]
    corrections: list[Tensor] = field(default_factory=list)
    draws: list[tuple[int, int]] = field(default_factory=list)
    version: int = 0
    launch: dict[str, Any] = field(default_factory=dict)


@op("triton.optimizer")
def gradient_norm(coefficients: Tensor, parameters: Sequence[Parameters], max_norm: float) -> Tensor:
    """Return fp32 [2]: the 2-norm of all gradients, and the factor that clips them to `max_norm`, at most 1.

    Args:
        coefficients: any tensor on the gradients' device.
        parameters: their gradients are read.
        max_norm: as in torch.nn.utils.clip_grad_norm_; inf does not clip.
    """
    norms = [torch.linalg.vector_norm(gradient.float()) for group in parameters for gradient in group.gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=coefficients.device)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if math.isfinite(max_norm) else torch.ones_like(norm)
    return torch.stack([norm, factor])


@op("triton.optimizer", "native.optimizer")
def prepare_step(
    settings: Tensor,
    groups: Tensor,
    steps: Tensor,
    coefficients: Tensor,
    rule: str,
    factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Count a step of each parameter and write its coefficients.

    Args:
        settings: fp64 [groups, 9]: columns `SETTINGS`.
        groups: int32 [n]: group of each parameter.
        steps: fp32 [n]: steps so far; increased by one in place.
        coefficients: fp32 [n, 13]: fields of `Coefficients`; overwritten.
        rule: a name in `RULES`.
        factor: fp32 []: of the gradients, from clipping; None: 1.
        found_inf: fp32 []: a value other than 0 leaves `steps` unchanged; None: 0.
    """
    counted = 1.0 if found_inf is None else (found_inf == 0).to(steps)
    steps += counted
    t = steps.double()
    rows = dict(zip(SETTINGS, settings[groups.long()].unbind(1), strict=True))
    chosen = RULES[rule]
    beta3, alpha = rows["beta3"], rows["alpha"]
    if rule == "ademamix":
        beta3 = scheduled_beta3(t, rows["beta1"], beta3, rows["t_beta3"])
        alpha = torch.where(rows["t_alpha"] > 0, alpha * (t / rows["t_alpha"]).clamp(max=1), alpha)
    ones = torch.ones_like(t)
    first = 1 / (1 - rows["beta1"] ** t) if chosen.corrects_bias else ones
    values = Coefficients(
        scale=ones if factor is None else factor.double().expand_as(t),
        decay=rows["weight_decay"] * (rows["lr"] if chosen.decoupled else 1),
        rate=rows["lr"] * (first if rule == "adamw" else 1),
        root=(1 - rows["beta2"] ** t).rsqrt() if chosen.corrects_bias else ones,
        eps=rows["eps"],
        alpha=alpha,
        beta1=rows["beta1"],
        rest1=1 - rows["beta1"],
        beta2=rows["beta2"],
        rest2=1 - rows["beta2"],
        beta3=beta3,
        rest3=1 - beta3,
        first=first,
    )
    coefficients.copy_(torch.stack(values, dim=1))


def scheduled_beta3(t: Tensor, beta1: Tensor, beta3: Tensor, horizon: Tensor) -> Tensor:
    """AdEMAMix's beta3 at step t: its half-life grows linearly from beta1's until step `horizon` (0: constant)."""
    share = (t / horizon.clamp(min=1)).clamp(max=1)
    low, high = beta1.log(), beta3.log()
    grown = (low * high / ((1 - share) * high + share * low)).exp().minimum(beta3)
    return torch.where(horizon > 0, grown, beta3)


class Trust(NamedTuple):
    """A ratio of two norms for each parameter, by which its step is scaled.

    Attributes:
        rules: names of the rules that it scales.
        scales: names of the coefficients that are multiplied by the ratio.
        reads_states: whether it compares the weight with the update, which depends on the states.
    """

    rules: tuple[str, ...]
    scales: tuple[str, ...]
    reads_states: bool = True


# - lamb: ‖p‖ / ‖r + λp‖, where r is Adam's direction and λ the weight decay; 1 if a norm is 0 (You et al. 2020,
#   arXiv:1904.00962, algorithm 2, with φ the identity).
# - lars: alpha·‖p‖ / (‖g‖ + λ‖p‖); 1 if a norm is 0 (You et al. 2017, arXiv:1708.03888, equation 6). The learning rate
#   multiplies the momentum, as in torch's SGD, and not the gradient.
# - clip: min(1, alpha·‖p‖ / ‖u‖), where u is Adam's direction or the momentum: LAMB and LARS in bitsandbytes.
TRUSTS = {
    "lamb": Trust(("adamw",), ("rate", "decay")),
    "lars": Trust(("momentum",), ("scale", "decay"), reads_states=False),
    "clip": Trust(("adamw", "momentum"), ("rate",)),
}


@op("triton.optimizer", "native.optimizer")
def scale_by_trust(coefficients: Tensor, parameters: Sequence[Parameters], trust: str) -> Tensor:
    """Multiply coefficients by each parameter's trust ratio.

    The weights and gradients, and except with "lars" the states, are read once more than by the step alone.

    Args:
        coefficients: fp32 [m, 13], from `prepare_step`; columns `TRUSTS[trust].scales` are changed in place.
        parameters: all of one rule in `TRUSTS[trust].rules`.
        trust: a name in `TRUSTS`.

    Returns:
        fp32 [m, 2]: squared 2-norms of each weight, and of the update or gradient that it is compared with. Those of
        "lamb" are of the update times the learning rate.
    """
    squares = torch.zeros(len(coefficients), 2, device=coefficients.device)
    for group in parameters:
        for i, row in enumerate(group.rows.tolist()):
            p, u = _compared(group, i, Coefficients(*coefficients[row].unbind()), trust)
            squares[row] = torch.stack([p.square().sum(), u.square().sum()])
        apply_trust(coefficients, squares, group.rows, trust)
    return squares


def _compared(parameters: Parameters, i: int, c: Coefficients, trust: str) -> tuple[Tensor, Tensor]:
    """fp32 [n] each: the weight of parameter i, and the vector whose norm is compared with its norm."""
    rule = RULES[parameters.rule]
    storage = STORAGES[parameters.storage]
    weight = parameters.weights[i]
    p = full_weight(weight.flatten(), parameters.corrections[i] if parameters.corrections else None)
    g = parameters.gradients[i].flatten().float() * c.scale
    if trust == "lars":
        return p, g
    states = zip(parameters.states[i], rule.signed, strict=True)
    s = [storage.decode(*state, signed, weight.numel()) for state, signed in states]
    if not rule.decoupled:
        g = g + c.decay * p
    size = c.rate if trust == "lamb" else c.first
    moved, _ = rule.update(torch.zeros_like(p), g, s, c._replace(rate=size, decay=torch.zeros_like(size)))
    return p, c.decay * p - moved if trust == "lamb" else moved


def apply_trust(coefficients: Tensor, squares: Tensor, rows: Tensor, trust: str) -> None:
    """Multiply the coefficients of `rows` by the trust ratios from their `squares`; see `scale_by_trust`."""
    rows = rows.to(coefficients.device).long()
    c = Coefficients(*coefficients[rows].unbind(1))
    weight, update = squares[rows].sqrt().unbind(1)
    if trust == "clip":
        limit = c.alpha * weight
        ratio = torch.where(update > limit, limit / update, 1.0)
    else:
        # with "lamb" the update has the learning rate, rate / first, in it
        ratio = (
            c.rate / c.first * weight / update if trust == "lamb" else c.alpha * weight / (update + c.decay * weight)
        )
        ratio = torch.where((weight > 0) & (update > 0), ratio, 1.0)
    for name in TRUSTS[trust].scales:
        coefficients[rows, Coefficients._fields.index(name)] = getattr(c, name) * ratio


@op("triton.optimizer", "cuda.optimizer8", "native.optimizer")
def update_parameters(coefficients: Tensor, steps: Tensor, parameters: Parameters, found_inf: Tensor | None) -> None:
    """Update weights, states and corrections in place.

    Args:
        coefficients: fp32 [m, 13], from `prepare_step`.
        steps: fp32 [m], from `prepare_step`; the random numbers of stochastic rounding depend on it.
        parameters: their rows of `coefficients` and `steps` are `parameters.rows`.
        found_inf: fp32 []: a value other than 0 leaves everything unchanged; None: 0.
    """
    rule, storage = RULES[parameters.rule], STORAGES[parameters.storage]
    applies = torch.ones((), dtype=torch.bool, device=coefficients.device) if found_inf is None else found_inf == 0
    for i, (weight, gradient) in enumerate(zip(parameters.weights, parameters.gradients, strict=True)):
        if not weight.numel():
            continue
        row = int(parameters.rows[i])
        c = Coefficients(*coefficients[row].unbind())
        correction = parameters.corrections[i] if parameters.corrections else None
        p = full_weight(weight.flatten(), correction)
        states, n = parameters.states[i], weight.numel()
        s = [storage.decode(*state, signed, n) for state, signed in zip(states, rule.signed, strict=True)]
        p, new = rule.update(p, gradient.flatten().float() * c.scale, s, c)
        for state, values, signed, positive in zip(states, new, rule.signed, rule.squares, strict=True):
            _copy_if(applies, state, storage.encode(values, signed, positive))
        draw = parameters.draws[i] if parameters.draws else (0, 0)
        rounded = round_weight(p, weight.dtype, parameters.rounding, steps[row], draw)
        _copy_if(applies, (weight.view(-1), correction), rounded)


def _copy_if(applies: Tensor, target: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
    for old, new in zip(target, values, strict=True):
        if old is not None and new is not None:
            old.copy_(torch.where(applies, new, old))


def full_weight(weight: Tensor, correction: Tensor | None) -> Tensor:
    """fp32 [n]: the weight with its correction, the bits that rounding to bf16 removed."""
    if correction is None:
        return weight.float()
    shift = 16 - 8 * correction.dtype.itemsize
    return (weight.float().view(torch.int32) + (correction.int() << shift)).view(torch.float32)


def round_weight(
    p: Tensor, dtype: torch.dtype, rounding: str, step: Tensor, draw: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """Round fp32 weights [n] to `dtype`; returns them and the correction, if `rounding` has one.

    "stochastic" rounds to one of the two neighbours, with the probability that makes the expectation p. The random
    number of an element depends on the step, the parameter and the element's number in the full parameter only, so that
    neither slices nor parts of an optimizer change it; `draw` is an entry of `Parameters.draws`. "correction16" stores
    the difference of the bit patterns of p and its bf16: no bit is lost. "correction8" stores the upper byte of that
    difference: the weight has 24 bits. Both round ties away from zero, so that the difference fits.
    """
    if rounding == "nearest" or dtype == torch.float32:
        return p.to(dtype), None
    bits = p.view(torch.int32)
    if rounding == "stochastic":
        number, first = draw
        noise = hash32(torch.arange(first, first + len(p), device=p.device), step.long(), number) & 0xFFFF
        return ((bits.long() + noise).int() & ~0xFFFF).view(torch.float32).to(dtype), None
    if rounding == "correction8":
        bits = bits + 0x80 & ~0xFF
    near = bits + 0x8000 & ~0xFFFF
    error = bits - near
    correction = (error >> 8).to(torch.int8) if rounding == "correction8" else error.to(torch.int16)
    return near.view(torch.float32).to(dtype), correction


def hash32(element: Tensor, step: Tensor, number: int) -> Tensor:
    """A 32-bit hash, as int64: rounds of the finalizer of MurmurHash3 (Appleby 2008) over element, step and number."""
    x = element ^ element >> 32
    for word in (step, number):
        x = (x ^ word) & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        x = x ^ x >> 16
    return x
