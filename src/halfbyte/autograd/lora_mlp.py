"""Gated MLPs: the gated unit activation(g)·u, and down(activation(gate(x))·up(x)) with adapters as one function.

g, u [M, I] are the outputs of gate and up, h = a(g)·u [M, I] and y = down(h) [M, H]; each projection as in `lora`:

    dh = dy·W + v·A (of down)     dg, du, h ← dh, g, u, in place     dA = vᵀ·h (of down)     gate and up from dg, du

With the FP8 recipe (`linear_fp8`), the unit's kernel writes h, and in the backward dg and du, in FP8 only, once their
scales are known.

On accelerators, with adapters on all three projections, the unit's kernel also computes the low-rank GEMMs around
it (`ops.lora_glu`), and g and u are saved without their low-rank terms.

Saved are x, g, u and the small x·Aᵀ and h·Aᵀ. The kernel that turns g and u into their gradients recomputes h in the
memory of dh. So two tensors [M, I] are saved instead of the four of separate modules (g, u, a(g), h), and three exist
at the peak of the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import on_compiler, to_compute_dtype
from ..ops import glu as ops
from ..ops.dora import column_dots
from ..ops.lora_glu import (
    Factors,
    Gradients,
    in_one_pass,
    lora_glu,
    lora_glu_backward_,
    lora_glu_backward_float8,
    lora_glu_float8,
)
from ..utils.errors import ModelError
from .dora import magnitude_gradient
from .function import OnceFunction
from .gemms import rows_of
from .lora import LoRA, Projections, RowLoRA, State, check, composed, magnitudes, refuse_compiled

if TYPE_CHECKING:
    from ..formats.base import Weight
    from .lora import GemmRecipe, OutputUse


COPIED_ROWS = 2048  # rows of gate and up that are copied at a time for DoRA's magnitudes


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
    """activation(gate) · up (SwiGLU, GeGLU), computed in fp32 and rounded once.

    The backward overwrites gate and up with their gradients, so pass outputs of projections that nothing else saves. A
    second backward, or another function that saved them, raises autograd's error about in-place changes.

    Args:
        gate, up: same shape and dtype; fp32, fp16 or bf16 (fp64 on a CPU). Halves of a fused projection are allowed.
        activation: "silu", "gelu" or "gelu_tanh" (Hugging Face's "gelu_pytorch_tanh").

    Raises:
        ModelError: an argument has the wrong dtype, shape or device; the message names it.
    """
    if on_compiler():
        return ops.glu.reference(gate, up, activation)
    return _GLU.apply(gate, up, activation)


def lora_mlp(
    x: Tensor,
    gate: Weight,
    up: Weight,
    down: Weight,
    biases: Sequence[Tensor | None] = (None, None, None),
    loras: Sequence[LoRA | RowLoRA | None] = (None, None, None),
    activation: ops.Activation = "silu",
    dropout: float = 0.0,
    output: bool = True,
    recipes: tuple[GemmRecipe | None, GemmRecipe | None] = (None, None),
    use: OutputUse = "unchanged",
) -> Tensor:
    """down(activation(gate(x)) · up(x)), each projection with its adapter.

    A second backward through the same graph raises autograd's error about in-place changes, since the first one
    overwrites saved tensors with gradients.

    Args:
        x: [..., H] float, as in `lora_qkv`.
        gate, up: [I, H], frozen; quantized or plain.
        down: [H, I].
        biases, loras: those of gate, up and down, or None.
        activation: "silu", "gelu" or "gelu_tanh" (Hugging Face's "gelu_pytorch_tanh").
        dropout: as in `lora_qkv`.
        output: False skips the GEMM of down and leaves the result unwritten, for recomputation in the backward
            (`autograd.checkpointing`).
        recipes: recipe of gate and up, and recipe of down, as in `lora_qkv`.
        use: what the caller does with the result, as in `lora_qkv`; not "overwritten".

    Returns:
        [..., H] in the dtype of the GEMMs.

    Raises:
        ModelError: shapes do not match (the message names them), a weight requires a gradient, the activation is
            unknown, or a recipe is used under torch.compile.
    """
    x = to_compute_dtype(x)
    if activation not in ops.ACTIVATIONS:
        raise ModelError(f"lora_mlp: activation is {activation!r}", f"use one of {', '.join(ops.ACTIVATIONS)}")
    check("lora_mlp (gate, up)", x, (gate, up), biases[:2], loras[:2])
    inner = x.new_empty((0, gate.shape[0]))
    check("lora_mlp (down)", inner, (down,), biases[2:], loras[2:])
    if on_compiler():
        refuse_compiled(recipes[0])
        gated, linear = composed(x, (gate, up), biases[:2], loras[:2], dropout)
        return composed(glu(gated, linear, activation), (down,), biases[2:], loras[2:], dropout)[0]
    first, first_biases, first_a, first_b = Projections.of(x, (gate, up), biases[:2], loras[:2], dropout, recipes[0])
    second, second_biases, second_a, second_b = Projections.of(x, (down,), biases[2:], loras[2:], dropout, recipes[1])
    output = output or bool(second.scaled)  # the gradient of DoRA's magnitude reads it
    scaled = magnitudes(loras[:2] if use == "deferred" else loras)
    return _MLP.apply(
        x, first, second, activation, output,
        *first_biases, *second_biases, *first_a, *second_a, *first_b, *second_b, *scaled,
    )  # fmt: skip


def _in_one_pass(x: Tensor, first: Projections, second: Projections, a: Sequence[Tensor]) -> bool:
    """Whether the unit's kernel also computes the low-rank GEMMs around it (`ops.lora_glu`)."""
    return len(a) == 3 and not first.by_rows and in_one_pass(x, max(factor.shape[0] for factor in a))


def _factors(first: Projections, first_state: State, a_down: Tensor, second: Projections) -> Factors:
    (_, gate_scale), (_, up_scale) = first.adapters
    b_gate, b_up = first_state.b
    return Factors(b_gate, b_up, a_down, gate_scale, up_scale, second.dropout)


def _overwrite(
    first: Projections, function: Callable[..., Any], tensors: Sequence[Tensor]
) -> tuple[list[Any], dict[int, Tensor]]:
    """Call `function`, which replaces gate and up by their gradients, and sum what DoRA's gradients read.

    With DoRA it is called on ranges of `COPIED_ROWS` rows, so that no more rows of gate and up are copied at a time.

    Args:
        tensors: gate, up and others, the arguments of `function`.

    Returns:
        The results of `function`; and Σ dg∘g and Σ du∘u over rows, by the index of the projections with DoRA without
        dropout.
    """
    scaled = first.scaled if first.dropout is None else []
    count = len(tensors[0])
    step = COPIED_ROWS if scaled else max(count, 1)
    results: list[Any] = []
    dots: dict[int, Tensor] = {}
    for begin in range(0, max(count, 1), step):
        ranges = [tensor[begin : begin + step] for tensor in tensors]
        copies = {i: ranges[i].clone() for i in scaled}
        results.append(function(*ranges))
        sums = {i: column_dots(ranges[i], values) for i, values in copies.items()}
        dots = {i: dots[i] + value for i, value in sums.items()} if dots else sums
    return results, dots


def _sum_of_ranges(ranges: Sequence[Gradients]) -> Gradients:
    """Concatenate row gradients of ranges of rows, and sum gradients of weights over the ranges."""
    if len(ranges) == 1:
        return ranges[0]
    v, *factors = zip(*ranges, strict=True)
    return Gradients(torch.cat(v), *(torch.stack(parts).sum(0) for parts in factors))


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, first, second, activation, needed, *tensors):
        n, m = first.factor_count, second.factor_count
        biases = tensors[:3]
        a = tensors[3 : 3 + n + m]
        b = tensors[3 + n + m : 3 + 2 * (n + m)]
        scaled_magnitudes = tensors[3 + 2 * (n + m) :]
        ctx.first = first
        ctx.second = second
        ctx.activation = activation
        ctx.shape = x.shape
        rows = rows_of(x)
        first_state = first.low_rank(rows, a[:n], b[:n])
        ctx.in_one_pass = _in_one_pass(x, first, second, a)
        (gate, up), dropped = first.outputs(rows, rows.shape[:1], biases[:2], None if ctx.in_one_pass else first_state)
        codes = None
        if ctx.in_one_pass:
            a_down, b_down = second.factors(a[n:], b[n:], x.dtype)
            operands = gate, up, first_state.u, _factors(first, first_state, a_down, second), activation
            slot = None if second.recipe is None else second.recipe.slot_of_input(gate)
            if slot is None:
                hidden, u_down = lora_glu(*operands)
            else:  # h in FP8 only, which down's GEMM reads
                values, u_down = lora_glu_float8(*operands, slot)
                hidden, codes = gate, slot.of(values)
            second_state = State(a_down, b_down, u_down)
        else:
            hidden = ops.glu(gate, up, activation)
            second_state = second.low_rank(hidden, a[n:], b[n:])
        if needed:
            (output,), dropped_down = second.outputs(hidden, x.shape[:-1], biases[2:], second_state, codes)
        else:
            output, dropped_down = x.new_empty(*x.shape[:-1], second.weights[0].shape[0]), []
        need_rows = any(ctx.needs_input_grad[8 : 8 + n])
        if len(scaled_magnitudes) > len(first.scaled) and second.dropout is None:
            dropped_down = [output]
        states = *first_state.flat(), *second_state.flat()
        saved = rows if need_rows else None, gate, up, *states, *biases
        ctx.save_for_backward(*saved, *dropped, *dropped_down, *scaled_magnitudes)
        ctx.split = 3 + len(first_state.flat()), 3 + len(states)
        ctx.scaled = len(scaled_magnitudes)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        first = ctx.first
        second = ctx.second
        needs = ctx.needs_input_grad
        n, m = first.factor_count, second.factor_count
        need_biases = needs[5:8]
        need_a_down = any(needs[8 + n : 8 + n + m])
        need_b = needs[8 + n + m : 8 + 2 * (n + m)]
        saved = ctx.saved_tensors
        rows, gate, up = saved[:3]
        first_end, second_end = ctx.split
        first_state = State.unflat(saved[3:first_end])
        second_state = State.unflat(saved[first_end:second_end])
        biases = saved[second_end : second_end + 3]
        outputs_end = len(saved) - ctx.scaled
        scaled_outputs, scaled_magnitudes = list(saved[second_end + 3 : outputs_end]), saved[outputs_end:]
        scaled_biases = [
            bias if dropout is None else None
            for bias, dropout in zip(biases, (first.dropout, first.dropout, second.dropout), strict=True)
        ]
        grad = rows_of(grad)
        dm_down = []
        if ctx.scaled > len(first.scaled):
            output = rows_of(scaled_outputs.pop())
            dm_down = [magnitude_gradient(column_dots(grad, output), grad, scaled_biases[2], scaled_magnitudes[-1])]
            del output
        v_down, db_down = second.low_rank_gradients([grad], second_state, need_b[n:])
        codes, name = None, ctx.activation
        # From here on gate and up hold their gradients; in FP8, `codes` holds these instead.
        if ctx.in_one_pass:
            dh, _ = second.gradients(None, [grad], None, second_state, True)
            assert dh is not None
            factors, low = _factors(first, first_state, second_state.a, second), first_state.u
            slot = columns = None
            dots: dict[int, Tensor] = {}
            if first.recipe is not None and not any(need_biases[:2]) and not first.scaled:
                slot, columns = first.recipe.slot_of_gradients(first.weights, dh.dtype)
            if slot is None:
                ranges, dots = _overwrite(
                    first,
                    lambda gate, up, *operands: lora_glu_backward_(operands[0], gate, up, *operands[1:], factors, name),
                    (gate, up, dh, low, v_down),
                )
                gradients = _sum_of_ranges(ranges)
            else:
                gradients, values = lora_glu_backward_float8(
                    dh, gate, up, low, v_down, factors, ctx.activation, slot, columns
                )
                codes = slot.of(values)
            v = gradients.v
            *db, down_gradient = [factor.to(first.dtype) for factor in gradients[1:]]
            da_down = [down_gradient]
            # Sums over rows of the products of dg, du and their low-rank terms, which gate and up lack.
            low_rank_dots = {i: (db[i] * first_state.b[i]).sum(1) for i in first.scaled}
            del dh
        else:
            hidden, da_down = second.gradients(None, [grad], v_down, second_state, True)
            assert hidden is not None
            _, dots = _overwrite(  # overwrites dh by h, too
                first, lambda gate, up, dh: ops.glu_backward_(dh, gate, up, name, need_a_down), (gate, up, hidden)
            )
            if need_a_down:
                _, da_down = second.gradients(hidden, [grad], v_down, second_state, False)
            del hidden
            v, db = first.low_rank_gradients([gate, up], first_state, need_b[:n])
            low_rank_dots = {}
        if first.dropout is not None:
            pairs = zip(first.scaled, scaled_outputs, strict=True)
            dots = {i: column_dots((gate, up)[i], output) for i, output in pairs}
        dm = [
            magnitude_gradient(dots[i] + low_rank_dots.get(i, 0.0), (gate, up)[i], scaled_biases[i], magnitude)
            for i, magnitude in zip(first.scaled, scaled_magnitudes, strict=False)
        ]
        dx, da = first.gradients(rows, [gate, up], v, first_state, needs[0], codes)
        dx = None if dx is None else dx.view(ctx.shape)
        db, db_down = first.b_gradients(db), second.b_gradients(db_down)
        bias_gradients = [
            grad.sum(0) if need else None for grad, need in zip((gate, up, grad), need_biases, strict=True)
        ]
        return dx, None, None, None, None, *bias_gradients, *da, *da_down, *db, *db_down, *dm, *dm_down
