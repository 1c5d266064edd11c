"""Experts under torch.compile: two opaque ops, forward and backward, that graphs hold whole.

As with a linear (`autograd.linear`), a visible dequantize would keep the values of all experts until backward. Rows
are sorted again in backward, which gives the same order, and c is copied there, since what a graph has kept may not
change: 0.2 GB a layer at 8,192 tokens of Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..formats import from_spec
from ..ops.experts import StackedWeight, Unit, route
from ..utils.errors import ModelError
from .experts import Applied, ExpertWeights, Kept, backward_, forward
from .lora import is_quantized

_library = torch.library.Library("halfbyte", "FRAGMENT")
_GIVEN = (
    "Tensor x, Tensor routed, Tensor index, Tensor[] first, Tensor[] second, Tensor? first_bias, Tensor? second_bias, "
    "Tensor? a1, Tensor? b1, Tensor? a2, Tensor? b2, str[] specs, SymInt[] shapes, str activation, bool interleaved, "
    "float[] numbers"
)
_library.define(f"experts({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(
    f"experts_backward(Tensor grad, Tensor c, Tensor u1, Tensor u2, {_GIVEN}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
TENSORS = 11  # arguments before the first that is none


def compiled(
    x: Tensor, routed: Tensor, index: Tensor, weights: ExpertWeights, applied: Sequence[Applied | None],
    factors: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """As `experts`, whose arguments these are.

    Raises:
        ModelError: no graph can hold what is asked for.
    """
    unit = weights.unit
    if not isinstance(unit, Unit):
        raise ModelError("torch.compile: these experts' gate is the module's own", "run them uncompiled")
    if any(each is not None and each.dropout for each in applied):
        raise ModelError("torch.compile: experts' adapters have dropout", "set lora_dropout: 0, or run uncompiled")
    stacks = weights.first, weights.second
    parts, specs = zip(*map(_parts, stacks), strict=True)
    scales = [0.0 if each is None else each.scaling for each in applied]
    shapes = [size for stack in stacks for size in stack.shape]
    return torch.ops.halfbyte.experts(
        x, routed, index, *parts, weights.first_bias, weights.second_bias, *factors, list(specs), shapes,
        unit.activation, unit.interleaved, [*scales, unit.limit, unit.alpha, unit.offset],
    )[0]  # fmt: skip


def _parts(stack: Any) -> tuple[list[Tensor], str]:
    return (list(stack.parts.values()), stack.format.spec) if is_quantized(stack) else ([stack], "")


def _stack(parts: list[Tensor], spec: str, shape: list[int]) -> StackedWeight:
    experts, rows, columns = shape
    format_ = from_spec(spec) if spec else None
    names = ["values"] if format_ is None else format_.part_specs((experts, rows, columns))
    return StackedWeight(dict(zip(names, parts, strict=True)), (experts, rows, columns), format_)


def _read(given: tuple) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, tuple, tuple]:
    x, routed, index, first, second, first_bias, second_bias, *factors = given[:TENSORS]
    specs, shapes, activation, interleaved, (s1, s2, *numbers) = given[TENSORS:]
    stacks = _stack(first, specs[0], shapes[:3]), _stack(second, specs[1], shapes[3:])
    weights = ExpertWeights(*stacks, Unit(activation, interleaved, *numbers), first_bias, second_bias)
    applied = tuple(None if a is None else Applied(scale, 0.0) for a, scale in zip(factors[::2], (s1, s2), strict=True))
    return x, routed, index, weights, applied, tuple(factors)


def _none_of(x: Tensor) -> Tensor:
    return x.new_empty(0)


def _forward(*given: Any) -> tuple[Tensor, ...]:
    x, routed, index, weights, applied, factors = _read(given)
    out, kept = forward(x, routed, route(index, weights.first.shape[0]), weights, applied, factors)
    return out, kept.c, *(_none_of(x) if u is None else u for u in (kept.u1, kept.u2))


def _backward_op(grad: Tensor, c: Tensor, u1: Tensor, u2: Tensor, *given: Any) -> tuple[Tensor, ...]:
    x, routed, index, weights, applied, factors = _read(given)
    kept = Kept(c.clone(), u1, u2, None, None)
    routing = route(index, weights.first.shape[0])
    needs = [True, True, *(factor is not None for factor in factors)]
    found = backward_(grad.contiguous(), x, routed, index, kept, routing, weights, applied, factors, needs)
    return tuple(_none_of(x) if each is None else each.contiguous() for each in found)


_library.impl("experts", _forward, "CompositeExplicitAutograd")
_library.impl("experts_backward", _backward_op, "CompositeExplicitAutograd")


@torch.library.register_fake("halfbyte::experts", lib=_library)
def _(*given):
    x, index, a1, a2, shapes = given[0], given[2], given[7], given[9], given[TENSORS + 1]
    slots = index.shape[0] * index.shape[1]
    u = [_none_of(x) if a is None else x.new_empty(slots, a.shape[1]) for a in (a1, a2)]
    return x.new_empty(x.shape[0], shapes[4]), x.new_empty(slots, shapes[1]), *u


@torch.library.register_fake("halfbyte::experts_backward", lib=_library)
def _(grad, c, u1, u2, *given):
    x, routed, factors = given[0], given[1], given[7:TENSORS]
    of_factors = [_none_of(x) if f is None else torch.empty(f.shape, dtype=f.dtype, device=f.device) for f in factors]
    return torch.empty_like(x), torch.empty(routed.shape, dtype=routed.dtype, device=routed.device), *of_factors


def _setup_context(ctx, inputs, output):
    tensors, parts = inputs[:3], [*inputs[3], *inputs[4]]
    ctx.save_for_backward(*output[1:], *tensors, *parts, *inputs[5:TENSORS])
    ctx.counts, ctx.rest = (len(inputs[3]), len(inputs[4])), inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    c, u1, u2, x, routed, index, *tensors = ctx.saved_tensors
    first, second = ctx.counts
    parts = tensors[:first], tensors[first : first + second]
    given = x, routed, index, *parts, *tensors[first + second :], *ctx.rest
    dx, d_routed, *found = torch.ops.halfbyte.experts_backward(grad, c, u1, u2, *given)
    of_factors = [None if f is None else g for f, g in zip(tensors[-4:], found, strict=True)]
    nothing = [None] * first, [None] * second
    return dx, d_routed, None, *nothing, None, None, *of_factors, *[None] * len(ctx.rest)


torch.library.register_autograd("halfbyte::experts", _backward, setup_context=_setup_context, lib=_library)
