"""Gated DeltaNet in generation: the recurrence over prompts and over one more token. The specification.

It follows a causal convolution over the last K inputs of each channel of q, k and v, and SiLU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op
from .delta_rule import delta_rule, unit


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and β in fp32 (fp64) from a layer's inputs a and b [..., Hv]; a_log, dt_bias [Hv]."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(exact).exp() * F.softplus(a.to(exact) + dt_bias.to(exact)), b.to(exact).sigmoid()


def heads_of(mixed: Tensor, key_heads: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split mixed [..., C] into q and k [..., Hk, Dk] and v [..., Hv, Dv], for states [S, Hv, Dk, Dv]."""
    _, heads, key_size, value_size = states.shape
    query, key, value = mixed.split([key_heads * key_size, key_heads * key_size, heads * value_size], dim=-1)
    query, key = (x.unflatten(-1, (key_heads, key_size)) for x in (query, key))
    return query, key, value.unflatten(-1, (heads, value_size))


@op("triton.delta_net")
def conv_step_(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, seats: Tensor) -> Tensor:
    """silu(conv(x)) of one more token per sequence, which is appended to the sequence's state.

    Args:
        x: [R, C]; fp32, fp16 or bf16.
        weight: [C, K], any float dtype; bias: [C].
        states: [S, C, K − 1] in x's dtype: the previous inputs, oldest first; changed in place.
        seats: int64 [R], the state of each sequence. If several share one, the state is undefined afterwards.

    Returns:
        [R, C] in x's dtype.
    """
    window = torch.cat([states[seats], x.unsqueeze(-1)], -1)
    states[seats] = window[..., 1:]
    exact = torch.promote_types(x.dtype, torch.float32)
    y = (window.to(exact) * weight.to(exact)).sum(-1)
    return F.silu(y if bias is None else y + bias.to(exact)).to(x.dtype)


@op("triton.delta_net")
def delta_step_(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    seats: Tensor,
    key_heads: int,
) -> Tensor:
    """Advance the recurrence by one token of each sequence.

    Args:
        mixed: [R, C]: q, k and v of all heads, C = 2·Hk·Dk + Hv·Dv; fp32, fp16 or bf16.
        a, b: [R, Hv] in mixed's dtype, the inputs of `gates`.
        a_log, dt_bias: [Hv], any float dtype.
        states: fp32 (fp64) [S, Hv, Dk, Dv], changed in place.
        seats: int64 [R], as in `conv_step_`.
        key_heads: Hk, dividing Hv.

    Returns:
        [R, Hv, Dv] in mixed's dtype.
    """
    exact, group = torch.promote_types(mixed.dtype, torch.float32), states.shape[1] // key_heads
    query, key, value = heads_of(mixed.to(exact), key_heads, states)
    query, key = (unit(x)[0].repeat_interleave(group, -2) for x in (query, key))
    query, (decay, beta) = query * states.shape[2] ** -0.5, gates(a, b, a_log, dt_bias)
    state = states[seats] * decay.exp()[..., None, None]
    change = (value - torch.einsum("rhkv,rhk->rhv", state, key)) * beta.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * change.unsqueeze(-2)
    states[seats] = state.to(states.dtype)
    return torch.einsum("rhkv,rhk->rhv", state, query).to(mixed.dtype)


def delta_rows(
    mixed: Tensor, decay: Tensor, beta: Tensor, real: Tensor, states: Tensor, key_heads: int
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over sequences from a zero state.

    Args:
        mixed: [D, L, C], as in `delta_step_`.
        decay, beta: g and β in fp32 (fp64) [D, L, Hv].
        real: bool [D, L], False for padding.
        states: [S, Hv, Dk, Dv]; only its shape is used.

    Returns:
        [D, L, Hv, Dv] in mixed's dtype, and the final states [D, Hv, Dk, Dv] in fp32 (fp64).
    """
    decay, beta = (gate.where(real.unsqueeze(-1), 0) for gate in (decay, beta))
    return delta_rule(*heads_of(mixed, key_heads, states), decay, beta)
