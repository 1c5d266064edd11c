"""The experts of a mixture with their adapters, frozen and quantized, with hand-derived gradients.

Symbols of `ops.experts`; of each row p, its expert e and its token t:

    u₁ = x_t·A₁ᵀ      c = x_t·W₁ᵀ + s₁·u₁·B₁ᵀ + b₁      h = unit(c)
    u₂ = h·A₂ᵀ        y = h·W₂ᵀ + s₂·u₂·B₂ᵀ + b₂        out_t = Σ w·y over its k rows

and backward, with q = ∂L/∂out of the row's token:

    v₂ = s₂·q·B₂      z = q·W₂ + v₂·A₂       ∂L/∂w = ⟨z, h⟩ + ⟨q, b₂⟩     dh = w·z      dc by the unit
    dB₂ = s₂·Σ w·qᵀ·u₂        dA₂ = Σ w·v₂ᵀ·h          of expert e, over its rows
    v₁ = s₁·dc·B₁     dx_t = Σ (dc·W₁ + v₁·A₁)         dB₁ = s₁·Σ dcᵀ·u₁         dA₁ = Σ v₁ᵀ·x_t

Kept for backward are x once (not its k copies), c, and u₁ and u₂: at 8,192 tokens of Qwen3-30B-A3B 0.24 GB a layer. y
is not kept, since ⟨z, h⟩ stands for ⟨q, y⟩, nor h, which the unit's backward makes again where z was; c becomes dc.
A dropout's masks are a byte a value more. Factors are cast to the compute dtype in either pass and not kept: in 16 bits
they are 26 MB a layer there.

Source: LoRA and the order of its sums as in `autograd.lora`; ∂L/∂w from h, SonicMoE (arXiv:2512.14080, §3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import on_compiler, to_compute_dtype
from ..formats import Blockwise4
from ..formats.stack import is_mxfp4
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
from .lora import LoRA, gradient_dtype, is_quantized

# Rows an expert, on average, above which a stack is decoded once for its product, not in each tile, by kernels that do
# not hide it (`multiplies_codes`). In Triton, a layer of Qwen3-30B-A3B forward and backward on an H200, decoded first
# and packed: 2.17 and 2.14 ms at 64, 2.32 and 2.54 at 128, 3.05 and 4.00 at 256, 4.44 and 6.67 at 512.
DECODED_ROWS = 64

Gate = Callable[[Tensor], Tensor]  # [S, ·] → [S, I]: a unit that no formula of ours says, differentiable by torch


@dataclass(frozen=True)
class ExpertWeights:
    """The frozen tensors of a layer's experts, and what they compute between them.

    Args:
        first: [E, N, K], N being 2I for gated units: gate and up; a tensor, quantized or not, or a StackedWeight; or
            what has a `shape` and gives a tensor when its method `arrived` is called, before each product.
        second: [E, H, I], likewise.
        unit: between the two; or a function of c.
        first_bias, second_bias: [E, N] and [E, H], or None.
    """

    first: Any
    second: Any
    unit: Unit | Gate
    first_bias: Tensor | None = None
    second_bias: Tensor | None = None


class Applied(NamedTuple):
    """How an adapter is applied."""

    scaling: float
    dropout: float


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    weights: ExpertWeights,
    first: LoRA | None = None,
    second: LoRA | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Σ_j w_tj·expert_tj(x_t) of each token.

    Args:
        x: [T, K] float. Products run in its dtype, or autocast's; fp32 adapters are cast to it.
        top_k_index: integers [T, k], below E.
        top_k_weights: float [T, k]; may want a gradient.
        first, second: adapters of the two stacks, as stacks: A [E, r, K], B [E, N, r]; or None.
        dropout: probability of dropping an input of each adapter, drawn for tokens and for rows of h; 0 outside
            training.

    Returns:
        [T, H], in the dtype of the products.

    Raises:
        ModelError: a shape that does not fit, by name, or a frozen tensor that wants a gradient.
    """
    x = to_compute_dtype(x)
    _check(x, top_k_index, top_k_weights, weights, (first, second))
    applied = tuple(None if lora is None else Applied(lora.scaling, dropout) for lora in (first, second))
    factors = [factor for lora in (first, second) for factor in ((None, None) if lora is None else (lora.a, lora.b))]
    if on_compiler():
        if hasattr(weights.first, "arrived") or hasattr(weights.second, "arrived"):
            raise ModelError("experts: torch.compile cannot fetch stacks from the host's memory", "compile nothing")
        from .experts_compiled import compiled

        return compiled(x, top_k_weights, top_k_index, weights, applied, factors)
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
        if {lora.a.device, lora.b.device} != {x.device}:  # kernels would read where nothing is
            found = f"A is on {lora.a.device}, B on {lora.b.device}, and x on {x.device}"
            raise ModelError(f"experts: of the {name} adapter {found}", "move the adapter to the device of x")
        (count, rows, columns), rank = weight.shape, lora.a.shape[1]
        if tuple(lora.a.shape) != (count, rank, columns) or tuple(lora.b.shape) != (count, rows, rank):
            found = f"A {list(lora.a.shape)}, B {list(lora.b.shape)}, and the stack is {list(weight.shape)}"
            raise ModelError(f"experts: the {name} adapter is {found}", "give A [E, r, K] and B [E, N, r]")


def stack_of(weight: Any, dtype: torch.dtype, slots: int) -> StackedWeight:
    """A frozen stack [E, N, K] of `ExpertWeights` as ops take it for so many slots: packed, or its values, where those
    are faster."""
    if hasattr(weight, "arrived"):
        weight = weight.arrived()
    stack = weight if isinstance(weight, StackedWeight) else _stacked(weight)
    if stack.format is None:
        return StackedWeight.plain(stack.parts["values"].to(dtype))
    part = next(iter(stack.parts.values()))
    in_products = isinstance(stack.format, Blockwise4) or is_mxfp4(stack.format)
    few = slots <= DECODED_ROWS * stack.shape[0]
    if not ((few and in_products) or multiplies_codes(part, stack, slots, dtype)):
        return StackedWeight.plain(stack.values(dtype))
    return stack


def _stacked(weight: Any) -> StackedWeight:
    quantized = is_quantized(weight)
    parts, format_ = (weight.parts, weight.format) if quantized else ({"values": weight.detach()}, None)
    return StackedWeight(parts, tuple(weight.shape), format_)


class _Adapter(NamedTuple):
    """An adapter in the compute dtype, and the probability of dropping its inputs."""

    a: Tensor
    b: Tensor
    scale: float
    dropout: float

    @classmethod
    def of(cls, a: Tensor | None, b: Tensor | None, how: Applied | None, dtype: torch.dtype) -> _Adapter | None:
        if a is None or b is None or how is None:
            return None
        return cls(a.detach().to(dtype).contiguous(), b.detach().to(dtype).contiguous(), how.scaling, how.dropout)

    def drop(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x as the adapter reads it, and which values it reads: bool of x's shape, None if all."""
        return torch.native_dropout(x, self.dropout, True) if self.dropout else (x, None)

    def dropped(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x, or a gradient of what `drop` gave, with a mask of before."""
        if mask is None:
            return x
        kept = 1 / (1 - self.dropout) if self.dropout < 1 else 0.0
        return torch.ops.aten.native_dropout_backward(x, mask, kept)


def _project(
    x: Tensor, weight: Tensor, bias: Tensor | None, adapter: _Adapter | None, routing: Routing, gather: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x·Wᵀ with the adapter's term and the bias, u, and the mask of its dropout."""
    low_rank = u = mask = None
    if adapter is not None:
        read, mask = adapter.drop(x)
        u = grouped_product(read, StackedWeight.plain(adapter.a), routing, gather)
        low_rank = LowRank(u, adapter.b, adapter.scale)
    bias = None if bias is None else bias.to(x.dtype)
    return (
        grouped_product(
            x, stack_of(weight, x.dtype, routing.order.numel()), routing, gather, low_rank=low_rank, bias=bias
        ),
        u,
        mask,
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
    mask: Tensor | None,
    routing: Routing,
    gather: bool,
) -> Tensor:
    """grad·W + v·A of each row, the latter where `mask` [S, ·] of the adapter's dropout has ones."""
    stack = stack_of(weight, grad.dtype, routing.order.numel())
    low_rank = None if adapter is None or v is None else LowRank(v, adapter.a, 1.0)
    if mask is None or adapter is None or v is None:
        return grouped_product(grad, stack, routing, gather, transposed=True, low_rank=low_rank)
    term = grouped_product(v, StackedWeight.plain(adapter.a), routing, transposed=True)
    return grouped_product(grad, stack, routing, gather, transposed=True) + adapter.dropped(term, mask)


def _unit(c: Tensor, unit: Unit | Gate) -> Tensor:
    """Return h in c's dtype: autocast widens some activations, such as the square of a ReLU (Nemotron-H)."""
    return expert_unit(c, unit) if isinstance(unit, Unit) else unit(c).to(c.dtype)


def _unit_backward(
    z: Tensor, c: Tensor, unit: Unit | Gate, weights: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """∂L/∂w of each slot, h and dc; z and c are used up."""
    if isinstance(unit, Unit):
        return expert_unit_backward_(z, c, unit, weights, routing.order), z, c
    with torch.enable_grad():
        leaf = c.detach().requires_grad_()
        hidden = unit(leaf).to(c.dtype)
    of_rows = weights[routing.order]
    (dc,) = torch.autograd.grad(hidden, leaf, z * of_rows[:, None].to(z.dtype))
    exact = torch.promote_types(z.dtype, torch.float32)
    products = (z.to(exact) * hidden.detach().to(exact)).sum(1)
    slots = torch.empty_like(weights).index_copy_(0, routing.order.long(), products.to(weights.dtype))
    return slots, hidden.detach(), dc


class Kept(NamedTuple):
    """What backward reads of a forward: c, and of each adapter u and the mask of its dropout, where there is one."""

    c: Tensor
    u1: Tensor | None
    u2: Tensor | None
    mask1: Tensor | None
    mask2: Tensor | None


Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]  # A and B of both adapters


def _adapters(factors: Factors, applied: Sequence[Applied | None], dtype: torch.dtype) -> tuple[_Adapter | None, ...]:
    pairs = factors[:2], factors[2:]
    return tuple(_Adapter.of(*pair, how, dtype) for pair, how in zip(pairs, applied, strict=True))


def forward(
    x: Tensor, routed: Tensor, routing: Routing, weights: ExpertWeights, applied: Sequence[Applied | None],
    factors: Factors,
) -> tuple[Tensor, Kept]:  # fmt: skip
    """out of the module's formulas, without autograd."""
    first, second = _adapters(factors, applied, x.dtype)
    c, u1, mask1 = _project(x, weights.first, weights.first_bias, first, routing, True)
    hidden = _unit(c, weights.unit)
    y, u2, mask2 = _project(hidden, weights.second, weights.second_bias, second, routing, False)
    return combine(y, routing, routed), Kept(c, u1, u2, mask1, mask2)


class Gradients(NamedTuple):
    """Of x, of the routing weights, and of A and B of both adapters; None: it was not asked for."""

    x: Tensor | None
    routed: Tensor | None
    a1: Tensor | None
    b1: Tensor | None
    a2: Tensor | None
    b2: Tensor | None


def backward_(
    grad: Tensor, x: Tensor, routed: Tensor, index: Tensor, kept: Kept, routing: Routing, weights: ExpertWeights,
    applied: Sequence[Applied | None], factors: Factors, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """The gradients of the module's formulas; `kept.c` is used up.

    Args:
        grad: [T, H] contiguous, of out.
        needs: which of `Gradients` are asked for.
    """
    first, second = _adapters(factors, applied, x.dtype)
    a1, b1, a2, b2 = factors
    of_slots = routed.detach().reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    of_rows = of_slots[routing.order][:, None]
    v2 = _low_rank_gradient(grad, second, routing, True)
    z = _input_gradient(grad, weights.second, second, v2, kept.mask2, routing, True)
    d_slots, hidden, dc = _unit_backward(z, kept.c.detach(), weights.unit, of_slots, routing)
    da1 = db1 = da2 = db2 = dx = None
    if second is not None and v2 is not None and needs[4]:
        read = second.dropped(hidden, kept.mask2)
        da2 = _outer(read, (v2 * of_rows).to(x.dtype), routing, False, 1.0, a2).mT
    if second is not None and kept.u2 is not None and needs[5]:
        db2 = _outer(grad, (kept.u2 * of_rows).to(x.dtype), routing, True, second.scale, b2)
    del z, hidden
    if first is not None and needs[3]:
        db1 = _outer(dc, kept.u1, routing, False, first.scale, b1)
    v1 = _low_rank_gradient(dc, first, routing, False) if needs[0] or needs[2] else None
    if first is not None and v1 is not None and needs[2]:
        da1 = _outer(first.dropped(x, kept.mask1), v1, routing, True, 1.0, a1).mT
    if needs[0]:
        mask = None if kept.mask1 is None else kept.mask1[routing.tokens]
        dx = combine(_input_gradient(dc, weights.first, first, v1, mask, routing, False), routing, None)
    d_weights = _routed(d_slots, grad, index, weights.second_bias, routed) if needs[1] else None
    return Gradients(dx, d_weights, da1, db1, da2, db2)


class _Experts(OnceFunction):
    @staticmethod
    def forward(ctx, x, top_k_weights, index, weights, applied, *factors):
        routing = route(index, weights.first.shape[0])
        out, kept = forward(x, top_k_weights, routing, weights, applied, factors)
        ctx.save_for_backward(x, top_k_weights, index, *kept, *factors, *routing[:4])
        # Attributes: frozen weights outlive the graph, and hooks that offload what is saved must not carry them along.
        ctx.weights, ctx.applied, ctx.sizes = weights, applied, routing[4:]
        return out

    @staticmethod
    def backward(ctx, grad):
        x, top_k_weights, index, *tensors = ctx.saved_tensors
        kept, factors, routing = Kept(*tensors[:5]), tuple(tensors[5:9]), Routing(*tensors[9:], *ctx.sizes)
        needs = (*ctx.needs_input_grad[:2], *ctx.needs_input_grad[5:])
        given = kept, routing, ctx.weights, ctx.applied, factors, needs
        found = backward_(grad.contiguous(), x, top_k_weights, index, *given)
        return found.x, found.routed, None, None, None, *found[2:]


def _outer(wide: Tensor, narrow: Any, routing: Routing, gather: bool, alpha: float, factor: Any) -> Tensor:
    return grouped_outer(wide, narrow, routing, gather, alpha, gradient_dtype(factor))


def _routed(d_slots: Tensor, grad: Tensor, index: Tensor, bias: Tensor | None, weights: Tensor) -> Tensor:
    """∂L/∂w [T, k] with the second bias's share."""
    found = d_slots.view_as(index)
    if bias is not None:
        found = found + (grad @ bias.to(grad.dtype).t()).gather(1, index.long())
    return found.to(weights.dtype)
