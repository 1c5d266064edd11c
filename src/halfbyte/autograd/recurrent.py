"""Differentiable operations of linear-attention layers: the gated delta rule, Mamba-2's scan and causal convolutions.

All save only their inputs and recompute the rest in the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..ops import causal_conv as conv_ops
from ..ops import chunk_scan as scan_ops
from ..ops import delta_rule as ops
from .function import OnceFunction


class _DeltaRule(OnceFunction):
    @staticmethod
    def forward(ctx, *rows):
        ctx.save_for_backward(*rows)
        with _fp32_matmuls(rows[2]):
            return ops.delta_rule(*rows)[0]

    @staticmethod
    def backward(ctx, grad):
        with _fp32_matmuls(grad):
            return *ops.delta_rule_backward(grad, *ctx.saved_tensors), None


@contextlib.contextmanager
def _fp32_matmuls(like: Tensor) -> Iterator[None]:
    """Disable autocast; on a GPU allow TF32 if `like` is 16-bit, since the results are rounded to 16 bits anyway."""
    options = torch.backends.cuda.matmul
    allowed = options.allow_tf32
    with torch.autocast(like.device.type, enabled=False):
        try:
            options.allow_tf32 = allowed or (like.is_cuda and like.element_size() == 2)
            yield
        finally:
            options.allow_tf32 = allowed


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, first: Tensor | None = None
) -> Tensor:
    """The gated delta rule with an initial state of zero in each row; arguments as in `ops.delta_rule.Rows`.

    Returns:
        [D, L, Hv, Dv] in the value's dtype.
    """
    return _DeltaRule.apply(query, key, value, decay, beta, first)


class _CausalConv(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, bias, begins, silu):
        ctx.save_for_backward(x, weight, bias, begins)
        ctx.silu = silu
        return conv_ops.causal_conv(x, weight, bias, begins, silu)

    @staticmethod
    def backward(ctx, grad):
        return conv_ops.causal_conv_backward(grad, *ctx.saved_tensors, ctx.silu), None, None, None, None


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, begins: Tensor, silu: bool) -> Tensor:
    """`ops.causal_conv` with a gradient of its input only; weight and bias are frozen."""
    return _CausalConv.apply(x, weight.detach(), None if bias is None else bias.detach(), begins, silu)


STATE_BYTES = 1 << 27  # of the states of chunks that are computed at once


class _ChunkScan(OnceFunction):
    @staticmethod
    def forward(ctx, x, step, decay, b, c, skip, begins):
        ctx.save_for_backward(x, step, decay, b, c, skip, begins)
        outs, finals = [], []
        for heads, groups in _head_parts(x, b):
            inputs = x[:, :, heads]
            keys = b[:, :, groups]
            queries = c[:, :, groups]
            factors = scan_ops.chunk_factors(step[:, :, heads], decay[:, :, heads], begins)
            states, final = scan_ops.chunk_states(inputs, factors, keys)
            skipped = None if skip is None else skip[heads]
            outs.append(scan_ops.chunk_outputs(inputs, factors, keys, queries, skipped, begins, states))
            finals.append(final)
        y, final = (outs[0], finals[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(finals, 1))
        ctx.mark_non_differentiable(final)
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    def backward(ctx, grad, _):
        x, step, decay, b, c, skip, begins = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        grad_step = torch.empty_like(step)
        grad_decay = torch.empty_like(decay)
        exact = torch.promote_types(b.dtype, torch.float32)
        grad_b, grad_c = (torch.zeros(like.shape, dtype=exact, device=like.device) for like in (b, c))
        for heads, groups in _head_parts(x, b):
            inputs = x[:, :, heads]
            keys = b[:, :, groups]
            queries = c[:, :, groups]
            factors = scan_ops.chunk_factors(step[:, :, heads], decay[:, :, heads], begins)
            states, _ = scan_ops.chunk_states(inputs, factors, keys)
            state_gradients = scan_ops.chunk_state_gradients(grad[:, :, heads], factors, queries)
            skipped = None if skip is None else skip[heads]
            gradients = scan_ops.chunk_gradients(
                grad[:, :, heads], inputs, factors, keys, queries, skipped, begins, states, state_gradients
            )
            grad_x[:, :, heads], grad_step[:, :, heads], grad_decay[:, :, heads] = gradients[:3]
            grad_b[:, :, groups] += gradients.b
            grad_c[:, :, groups] += gradients.c
        grad_skip = (grad.to(exact) * x).sum((0, 1, 3)).to(skip.dtype) if ctx.needs_input_grad[5] else None
        return grad_x, grad_step, grad_decay, grad_b.to(b.dtype), grad_c.to(c.dtype), grad_skip, None


def _head_parts(x: Tensor, b: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of heads, and of the groups that serve them, whose states take at most `STATE_BYTES`."""
    rows, tokens, heads, width = x.shape
    groups, size = b.shape[2:]
    chunks = -(-tokens // scan_ops.CHUNK)
    heads_at_once = max(STATE_BYTES // (rows * chunks * width * size * x.element_size()), 1)
    in_group = heads // groups
    if heads_at_once >= in_group:
        count = heads_at_once // in_group
        for group in range(0, groups, count):
            end = min(group + count, groups)
            yield slice(group * in_group, end * in_group), slice(group, end)
        return
    for head in range(0, heads, in_group):
        for first in range(head, head + in_group, heads_at_once):
            yield (
                slice(first, min(first + heads_at_once, head + in_group)),
                slice(head // in_group, head // in_group + 1),
            )


def chunk_scan(
    x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor | None, begins: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba-2's scan with an initial state of zero in each document; arguments as in `ops.chunk_scan`.

    Returns:
        y [R, T, H, P] in x's dtype, and the final state of each row [R, H, N, P] in fp32 (fp64), without a gradient.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _ChunkScan.apply(x, step, decay, b, c, skip, begins)
