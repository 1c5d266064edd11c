"""Frozen, possibly quantized mixture-of-experts layers with adapters, with hand-derived gradients.

Symbols as in `ops.experts`; for row p with expert e and token t:

    u₁ = x_t·A₁ᵀ      c = x_t·W₁ᵀ + s₁·u₁·B₁ᵀ + b₁      h = unit(c)
    u₂ = h·A₂ᵀ        y = h·W₂ᵀ + s₂·u₂·B₂ᵀ + b₂        out_t = Σ w·y over its k rows

Backward, with q = ∂L/∂out of the row's token:

    v₂ = s₂·q·B₂      z = q·W₂ + v₂·A₂       ∂L/∂w = ⟨z, h⟩ + ⟨q, b₂⟩     dh = w·z      dc by the unit
    dB₂ = s₂·Σ w·qᵀ·u₂        dA₂ = Σ w·v₂ᵀ·h          of expert e, over its rows
    v₁ = s₁·dc·B₁     dx_t = Σ (dc·W₁ + v₁·A₁)         dB₁ = s₁·Σ dcᵀ·u₁         dA₁ = Σ v₁ᵀ·x_t

Saved for backward are x (not its k copies), c, u₁ and u₂: 0.24 GB per layer at 8,192 tokens of Qwen3-30B-A3B. y is not
saved, since ⟨z, h⟩ replaces ⟨q, y⟩. h is not saved either: the unit's backward recomputes it in the memory of z, and
overwrites c by dc. Dropout masks are computed again from their seeds (`ops.dropout`). Adapter factors are cast to the
compute dtype in both passes and the casts are not saved (26 MB per layer of that model in 16 bits).

Source: LoRA and the order of its sums as in `autograd.lora`; ∂L/∂w from h, SonicMoE (arXiv:2512.14080, §3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..formats import from_spec
from ..formats.base import is_quantized
from ..ops.dropout import Dropout, drop
from ..ops.experts import (
    LowRank,
    Routing,
    StackedWeight,
    Unit,
    check_index,
    combine,
    expert_unit,
    expert_unit_backward_,
    grouped_outer,
    grouped_product,
    multiplies_codes,
    route,
)  # fmt: skip
from ..utils.errors import ModelError
from .function import OnceFunction
from .gemms import gradient_dtype
from .lora import LoRA

Gate = Callable[[Tensor], Tensor]  # [S, ·] → [S, I]: a module's own gate, differentiated by torch


@dataclass(frozen=True)
class ExpertWeights:
    """The frozen tensors of a layer's experts and the activation between its two GEMMs.

    Args:
        first: [E, N, K], with N = 2I for gated units (gate and up). A plain or quantized tensor, a StackedWeight, or an
            offloaded stack with the attribute `shape` and the method `fetch`, which is called before each GEMM.
        second: [E, H, I], as `first`.
        unit: the activation, or the module's own function of c.
        first_bias, second_bias: [E, N] and [E, H], or None.
    """

    first: Any
    second: Any
    unit: Unit | Gate
    first_bias: Tensor | None = None
    second_bias: Tensor | None = None


class Applied(NamedTuple):
    """Scaling of an adapter, and the mask of its inputs or None."""

    scaling: float
    dropout: Dropout | None


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    first: LoRA | None = None,
    second: LoRA | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Σ_j w_tj·expert_tj(x_t) for each token.

    Args:
        x: [T, K] float. The GEMMs run in its dtype, or in autocast's; fp32 adapters are cast to it.
        top_k_index: integers [T, k], below E.
        top_k_weights: float [T, k]; may require a gradient.
        first, second: adapters of the two stacks, A [E, r, K] and B [E, N, r]; or None.
        dropout: probability of dropping an input of each adapter, drawn per token and per row of h; 0 outside training.

    Returns:
        [T, H], in the dtype of the GEMMs.

    Raises:
        ModelError: shapes do not match (the message names them), or a frozen tensor requires a gradient.
    """
    x = to_compute_dtype(x)
    _check(x, top_k_index, top_k_weights, weights, (first, second))
    applied = tuple(
        None if lora is None else Applied(lora.scaling, Dropout.drawn(dropout, 1, x.device) if dropout else None)
        for lora in (first, second)
    )
    factors = [factor for lora in (first, second) for factor in ((None, None) if lora is None else (lora.a, lora.b))]
    if on_compiler():
        if hasattr(weights.first, "fetch") or hasattr(weights.second, "fetch"):
            raise ModelError(
                "experts: torch.compile does not support offloaded experts",
                "set expert_offload: false, or run the model uncompiled",
            )
        return _compiled(x, top_k_weights, top_k_index, weights, applied, factors)
    return _Experts.apply(x, top_k_weights, top_k_index, weights, applied, *factors)


def _check(x: Tensor, index: Tensor, routed: Tensor, weights: ExpertWeights, loras: tuple) -> None:
    check_index(index)
    if x.dim() != 2 or not x.is_floating_point():
        raise ModelError(f"experts: x is {x.dtype} {list(x.shape)}", "pass a float tensor [tokens, K]")
    if index.shape[0] != x.shape[0] or routed.shape != index.shape:
        shapes = f"x {list(x.shape)}, top_k_index {list(index.shape)}, top_k_weights {list(routed.shape)}"
        raise ModelError(f"experts: {shapes}", "give each token k indices and k weights")
    frozen = {name: getattr(weights, name) for name in ("first", "second", "first_bias", "second_bias")}
    for name, tensor in frozen.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ModelError(f"experts: {name} requires a gradient", "freeze it, or use another experts_implementation")
    pairs = {"first": (weights.first, loras[0]), "second": (weights.second, loras[1])}
    for name, (weight, lora) in pairs.items():
        if lora is None:
            continue
        if {lora.a.device, lora.b.device} != {x.device}:  # the kernels do not check the device
            tensors = f"A is on {lora.a.device}, B on {lora.b.device}, and x on {x.device}"
            raise ModelError(f"experts: of the {name} adapter {tensors}", "move the adapter to the device of x")
        (count, rows, columns), rank = weight.shape, lora.a.shape[1]
        if tuple(lora.a.shape) != (count, rank, columns) or tuple(lora.b.shape) != (count, rows, rank):
            tensors = f"A {list(lora.a.shape)}, B {list(lora.b.shape)}, and the stack is {list(weight.shape)}"
            raise ModelError(f"experts: the {name} adapter is {tensors}", "give A [E, r, K] and B [E, N, r]")


def stack_of(weight: Any, dtype: torch.dtype, slots: int) -> StackedWeight:
    """A stack [E, N, K] as `ops.experts` takes it for `slots` rows: quantized, or dequantized if that is faster."""
    if hasattr(weight, "fetch"):
        weight = weight.fetch()
    stack = weight if isinstance(weight, StackedWeight) else _stacked(weight)
    if stack.format is None:
        return StackedWeight.plain(stack.parts["values"].to(dtype))
    tensor = next(iter(stack.parts.values()))
    return stack if multiplies_codes(tensor, stack, slots, dtype) else StackedWeight.plain(stack.values(dtype))


def _stacked(weight: Any) -> StackedWeight:
    quantized = is_quantized(weight)
    tensors, format_ = (weight.parts, weight.format) if quantized else ({"values": weight.detach()}, None)
    return StackedWeight(tensors, tuple(weight.shape), format_)


class _Adapter(NamedTuple):
    """An adapter in the compute dtype, and the mask of its inputs or None."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: Dropout | None

    @classmethod
    def of(cls, a: Tensor | None, b: Tensor | None, applied: Applied | None, dtype: torch.dtype) -> _Adapter | None:
        if a is None or b is None or applied is None:
            return None
        return cls(
            a.detach().to(dtype).contiguous(), b.detach().to(dtype).contiguous(), applied.scaling, applied.dropout
        )

    def dropped(self, x: Tensor) -> Tensor:
        """x, or a gradient of the dropped x, after dropout."""
        return x if self.dropout is None else drop(x, self.dropout)


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: _Adapter | None, routing: Routing, gather: bool
) -> tuple[Tensor, Tensor | None]:
    """x·Wᵀ plus the adapter's term and the bias; and the adapter's u."""
    low_rank = u = None
    if adapter is not None:
        u = grouped_product(adapter.dropped(x), StackedWeight.plain(adapter.a), routing, gather)
        low_rank = LowRank(u, adapter.b, adapter.scale)
    bias = None if bias is None else bias.to(x.dtype)
    return (
        grouped_product(
            x, stack_of(weight, x.dtype, routing.order.numel()), routing, gather, low_rank=low_rank, bias=bias
        ),
        u,
    )


def _low_rank_gradient(grad: Tensor, adapter: _Adapter | None, routing: Routing, gather: bool) -> Tensor | None:
    """v = s·grad·B."""
    if adapter is None:
        return None
    return grouped_product(grad, StackedWeight.plain(adapter.b), routing, gather, transposed=True, alpha=adapter.scale)


def _input_gradient(
    grad: Tensor,
    weight: Tensor,
    adapter: _Adapter | None,
    v: Tensor | None,
    routing: Routing,
    gather: bool,
    tokens: Tensor | None = None,
) -> Tensor:
    """grad·W + v·A for each row, with the adapter's mask on v·A.

    Args:
        tokens: int [S], rows of the mask where x has a row per token; None: a row of the mask for each row.
    """
    stack = stack_of(weight, grad.dtype, routing.order.numel())
    if adapter is None or v is None or adapter.dropout is None:
        low_rank = None if adapter is None or v is None else LowRank(v, adapter.a, 1.0)
        return grouped_product(grad, stack, routing, gather, transposed=True, low_rank=low_rank)
    term = grouped_product(v, StackedWeight.plain(adapter.a), routing, transposed=True)
    return grouped_product(grad, stack, routing, gather, transposed=True) + drop(term, adapter.dropout, tokens)


def _unit(c: Tensor, unit: Unit | Gate) -> Tensor:
    """h in c's dtype, since autocast widens some activations such as the square of a ReLU (Nemotron-H)."""
    return expert_unit(c, unit) if isinstance(unit, Unit) else unit(c).to(c.dtype)


def _unit_backward(
    z: Tensor, c: Tensor, unit: Unit | Gate, weights: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """(∂L/∂w of each slot, h, dc); overwrites z and c."""
    if isinstance(unit, Unit):
        return expert_unit_backward_(z, c, unit, weights, routing.order), z, c
    with torch.enable_grad():
        leaf = c.detach().requires_grad_()
        hidden = unit(leaf).to(c.dtype)
    row_weights = weights[routing.order]
    (dc,) = torch.autograd.grad(hidden, leaf, z * row_weights[:, None].to(z.dtype))
    exact = torch.promote_types(z.dtype, torch.float32)
    dots = (z.to(exact) * hidden.detach().to(exact)).sum(1)
    slots = torch.empty_like(weights).index_copy_(0, routing.order.long(), dots.to(weights.dtype))
    return slots, hidden.detach(), dc


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward: c, and each adapter's u."""

    c: Tensor
    u1: Tensor | None
    u2: Tensor | None


Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # A₁, B₁, A₂, B₂


def _adapters(factors: Factors, applied: Sequence[Applied | None], dtype: torch.dtype) -> tuple[_Adapter | None, ...]:
    pairs = factors[:2], factors[2:]
    return tuple(_Adapter.of(*pair, adapter, dtype) for pair, adapter in zip(pairs, applied, strict=True))


def _forward(
    x: Tensor, routed: Tensor, routing: Routing, weights: ExpertWeights, applied: Sequence[Applied | None],
    factors: Factors,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """The forward of the module docstring, without autograd."""
    first, second = _adapters(factors, applied, x.dtype)
    c, u1 = _project(x, weights.first, weights.first_bias, first, routing, True)
    hidden = _unit(c, weights.unit)
    y, u2 = _project(hidden, weights.second, weights.second_bias, second, routing, False)
    return combine(y, routing, routed), Saved(c, u1, u2)


class Gradients(NamedTuple):
    """Gradients of x, the routing weights, and both adapters' A and B; None if not needed."""

    x: Tensor | None
    routed: Tensor | None
    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None


def _backward_(
    grad: Tensor, x: Tensor, routed: Tensor, index: Tensor, saved: Saved, routing: Routing, weights: ExpertWeights,
    applied: Sequence[Applied | None], factors: Factors, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """The backward of the module docstring; overwrites `saved.c`.

    Args:
        grad: [T, H] contiguous, ∂L/∂out.
        needs: which of `Gradients` to compute.
    """
    first, second = _adapters(factors, applied, x.dtype)
    a1, b1, a2, b2 = factors
    slot_weights = routed.detach().reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    row_weights = slot_weights[routing.order][:, None]
    v2 = _low_rank_gradient(grad, second, routing, True)
    z = _input_gradient(grad, weights.second, second, v2, routing, True)
    d_slots, hidden, dc = _unit_backward(z, saved.c.detach(), weights.unit, slot_weights, routing)
    da1 = db1 = da2 = db2 = dx = None
    if second is not None and v2 is not None and needs[4]:
        da2 = _outer(second.dropped(hidden), (v2 * row_weights).to(x.dtype), routing, False, 1.0, a2).mT
    if second is not None and saved.u2 is not None and needs[5]:
        db2 = _outer(grad, (saved.u2 * row_weights).to(x.dtype), routing, True, second.scale, b2)
    del z, hidden
    if first is not None and needs[3]:
        db1 = _outer(dc, saved.u1, routing, False, first.scale, b1)
    v1 = _low_rank_gradient(dc, first, routing, False) if needs[0] or needs[2] else None
    if first is not None and v1 is not None and needs[2]:
        da1 = _outer(first.dropped(x), v1, routing, True, 1.0, a1).mT
    if needs[0]:
        dx = combine(_input_gradient(dc, weights.first, first, v1, routing, False, routing.tokens), routing, None)
    d_routed = None
    if needs[1]:
        d_routed = d_slots.view_as(index)
        if weights.second_bias is not None:
            by_bias = grad @ weights.second_bias.to(grad.dtype).t()
            d_routed = d_routed + by_bias.gather(1, index.long())
        d_routed = d_routed.to(routed.dtype)
    return Gradients(dx, d_routed, da1, db1, da2, db2)


class _Experts(OnceFunction):
    @staticmethod
    def forward(ctx, x, top_k_weights, index, weights, applied, *factors):
        routing = route(index, weights.first.shape[0])
        out, saved = _forward(x, top_k_weights, routing, weights, applied, factors)
        read = x if ctx.needs_input_grad[5] else x.new_empty(0)  # dA₁ alone reads it
        ctx.save_for_backward(read, top_k_weights, index, *saved, *factors, *routing[:4])
        # Attributes, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.weights = weights
        ctx.applied = applied
        ctx.sizes = routing[4:]
        return out

    @staticmethod
    def backward(ctx, grad):
        x, top_k_weights, index, *tensors = ctx.saved_tensors
        saved = Saved(*tensors[:3])
        factors = tuple(tensors[3:7])
        routing = Routing(*tensors[7:], *ctx.sizes)
        needs = (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[5:])
        grads = _backward_(
            grad.contiguous(), x, top_k_weights, index, saved, routing, ctx.weights, ctx.applied, factors, needs
        )
        return grads.x, grads.routed, None, None, None, *grads[2:]


def _outer(wide: Tensor, narrow: Any, routing: Routing, gather: bool, alpha: float, factor: Any) -> Tensor:
    return grouped_outer(wide, narrow, routing, gather, alpha, gradient_dtype(factor))


# Under torch.compile: two opaque ops, forward and backward. As in `autograd.linear`, a visible dequantize would hold
# the values of all experts until the backward. The backward op sorts the rows again, which gives the same order, and
# copies c, since a graph may not change saved tensors: 0.2 GB per layer at 8,192 tokens of Qwen3-30B-A3B.
_library = torch.library.Library("halfbyte", "FRAGMENT")
_ARGUMENTS = (
    "Tensor x, Tensor routed, Tensor index, Tensor[] first, Tensor[] second, Tensor? first_bias, Tensor? second_bias, "
    "Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, str[] specs, SymInt[] shapes, str activation, bool interleaved, "
    "float[] numbers"
)
_library.define(f"experts({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"experts_backward(Tensor grad, Tensor c, Tensor u1, Tensor u2, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_TENSORS = 11  # number of leading tensor arguments


def _compiled(
    x: Tensor, routed: Tensor, index: Tensor, weights: ExpertWeights, applied: Sequence[Applied | None],
    factors: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """`experts` as one opaque op.

    Raises:
        ModelError: the experts have their own gate function, or their adapters have dropout.
    """
    unit = weights.unit
    if not isinstance(unit, Unit):
        raise ModelError(
            "torch.compile does not support the gate function of these experts", "run the model uncompiled"
        )
    if any(adapter is not None and adapter.dropout for adapter in applied):
        raise ModelError(
            "torch.compile does not support dropout on experts' adapters",
            "set lora_dropout: 0, or run the model uncompiled",
        )
    stacks = weights.first, weights.second
    tensors = [list(stack.parts.values()) if is_quantized(stack) else [stack] for stack in stacks]
    specs = [stack.format.spec if is_quantized(stack) else "" for stack in stacks]
    scales = [0.0 if adapter is None else adapter.scaling for adapter in applied]
    shapes = [size for stack in stacks for size in stack.shape]
    return torch.ops.halfbyte.experts(
        x, routed, index, *tensors, weights.first_bias, weights.second_bias, *factors, specs, shapes,
        unit.activation, unit.interleaved, [*scales, unit.limit, unit.alpha, unit.offset],
    )[0]  # fmt: skip


def _stack_from_parts(tensors: list[Tensor], spec: str, shape: list[int]) -> StackedWeight:
    experts, rows, columns = shape
    format_ = from_spec(spec) if spec else None
    names = ["values"] if format_ is None else format_.part_specs((experts, rows, columns))
    return StackedWeight(dict(zip(names, tensors, strict=True)), (experts, rows, columns), format_)


def _unpack(arguments: tuple) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, tuple, tuple]:
    """Convert the op's arguments (`_ARGUMENTS`) to the arguments of `_forward`."""
    x, routed, index, first, second, first_bias, second_bias, *factors = arguments[:_TENSORS]
    specs, shapes, activation, interleaved, (s1, s2, *numbers) = arguments[_TENSORS:]
    stacks = _stack_from_parts(first, specs[0], shapes[:3]), _stack_from_parts(second, specs[1], shapes[3:])
    weights = ExpertWeights(*stacks, Unit(activation, interleaved, *numbers), first_bias, second_bias)
    pairs = zip(factors[::2], (s1, s2), strict=True)
    applied = tuple(None if a is None else Applied(scale, None) for a, scale in pairs)
    return x, routed, index, weights, applied, tuple(factors)


def _empty(x: Tensor) -> Tensor:
    """Stand-in for None, which an op cannot return."""
    return x.new_empty(0)


def _forward_op(*arguments: Any) -> tuple[Tensor, ...]:
    x, routed, index, weights, applied, factors = _unpack(arguments)
    out, saved = _forward(x, routed, route(index, weights.first.shape[0]), weights, applied, factors)
    return out, saved.c, *(_empty(x) if u is None else u for u in (saved.u1, saved.u2))


def _backward_op(grad: Tensor, c: Tensor, u1: Tensor, u2: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, routed, index, weights, applied, factors = _unpack(arguments)
    saved = Saved(c.clone(), u1, u2)
    routing = route(index, weights.first.shape[0])
    needs = [True, True, *(factor is not None for factor in factors)]
    grads = _backward_(grad.contiguous(), x, routed, index, saved, routing, weights, applied, factors, needs)
    return tuple(_empty(x) if gradient is None else gradient.contiguous() for gradient in grads)


_library.impl("experts", _forward_op, "CompositeExplicitAutograd")
_library.impl("experts_backward", _backward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("halfbyte::experts", lib=_library)
def _(*arguments):
    x = arguments[0]
    index = arguments[2]
    a1 = arguments[7]
    a2 = arguments[9]
    shapes = arguments[_TENSORS + 1]
    slots = index.shape[0] * index.shape[1]
    u = [_empty(x) if a is None else x.new_empty(slots, a.shape[1]) for a in (a1, a2)]
    return x.new_empty(x.shape[0], shapes[4]), x.new_empty(slots, shapes[1]), *u


@torch.library.register_fake("halfbyte::experts_backward", lib=_library)
def _(grad, c, u1, u2, *arguments):
    x = arguments[0]
    routed = arguments[1]
    factors = arguments[7:_TENSORS]
    d_factors = [_empty(x) if f is None else torch.empty(f.shape, dtype=f.dtype, device=f.device) for f in factors]
    return torch.empty_like(x), torch.empty(routed.shape, dtype=routed.dtype, device=routed.device), *d_factors


def _setup_context(ctx, inputs, output):
    tensors, stacks = inputs[:3], [*inputs[3], *inputs[4]]
    ctx.save_for_backward(*output[1:], *tensors, *stacks, *inputs[5:_TENSORS])
    ctx.counts, ctx.rest = (len(inputs[3]), len(inputs[4])), inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward_of_op(ctx, grad, *_):
    c, u1, u2, x, routed, index, *tensors = ctx.saved_tensors
    first, second = ctx.counts
    stacks = tensors[:first], tensors[first : first + second]
    arguments = x, routed, index, *stacks, *tensors[first + second :], *ctx.rest
    dx, d_routed, *grads = torch.ops.halfbyte.experts_backward(grad, c, u1, u2, *arguments)
    d_factors = [None if f is None else g for f, g in zip(tensors[-4:], grads, strict=True)]
    no_stacks = [None] * first, [None] * second
    return dx, d_routed, None, *no_stacks, None, None, *d_factors, *[None] * len(ctx.rest)


torch.library.register_autograd("halfbyte::experts", _backward_of_op, setup_context=_setup_context, lib=_library)
