"""A Gated DeltaNet's recurrence over prompts and over one token more of each row: the specification.

    S ← e^g·S,  then  S ← S + k ⊗ β·(v − Sᵀk),  out = Sᵀq / √Dk

(Yang et al. 2025, arXiv:2412.06464, equation 10), of each value head, with q and k of length one; key heads serve
several value heads each. Before it a causal convolution over the last K inputs of each channel of q, k and v, and SiLU.

A prompt is taken in chunks of tokens (section 3.3 there). Within a chunk that begins with S, with G the sums of g:

    u_i + β_i·Σ_{j<i} e^(G_i − G_j)·(k_i·k_j)·u_j = β_i·(v_i − e^(G_i)·Sᵀk_i),  out_i = e^(G_i)·Sᵀq_i
        + Σ_{j≤i} e^(G_i − G_j)·(q_i·k_j)·u_j,  S ← e^G·S + Σ_j e^(G − G_j)·k_j ⊗ u_j
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op

CHUNK = 64  # tokens
EPSILON = 1e-6  # beside the squares that q and k are divided by the root of


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and β in fp32 (fp64) of a layer's inputs a and b [..., Hv]; a_log, dt_bias [Hv]."""
    exact = torch.promote_types(a.dtype, torch.float32)
    return -a_log.to(exact).exp() * F.softplus(a.to(exact) + dt_bias.to(exact)), b.to(exact).sigmoid()


def heads_of(mixed: Tensor, key_heads: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [..., Hv, Dk], of length one, and v [..., Hv, Dv], in fp32 (fp64), of mixed [..., C], beside states
    [S, Hv, Dk, Dv]; q is divided by √Dk."""
    _, heads, key_size, value_size = states.shape
    sizes = [key_heads * key_size, key_heads * key_size, heads * value_size]
    query, key, value = mixed.to(torch.promote_types(mixed.dtype, torch.float32)).split(sizes, dim=-1)
    query, key = (x.unflatten(-1, (key_heads, key_size)) for x in (query, key))
    query, key = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + EPSILON) for x in (query, key))
    query, key = (x.repeat_interleave(heads // key_heads, -2) for x in (query, key))
    return query * key_size**-0.5, key, value.unflatten(-1, (heads, value_size))


@op("triton.delta_net")
def conv_step_(x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, seats: Tensor) -> Tensor:
    """silu(conv(x)) of one more token a row, which joins the inputs that its state holds.

    Args:
        x: [R, C]; fp32, fp16 or bf16.
        weight: [C, K], any float dtype; bias: [C].
        states: [S, C, K − 1] in x's dtype: the inputs before, oldest first; changed in place.
        seats: int64 [R]: where each row's is; rows of one seat may leave anything there.

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
    """The recurrence for one more token of each row.

    Args:
        mixed: [R, C]: q, k and v of all heads, C = 2·Hk·Dk + Hv·Dv; fp32, fp16 or bf16.
        a, b: [R, Hv] in its dtype; what `gates` makes g and β of.
        a_log, dt_bias: [Hv], any float dtype.
        states: fp32 (fp64) [S, Hv, Dk, Dv], changed in place.
        seats: int64 [R], as in `conv_step_`.
        key_heads: Hk, dividing Hv.

    Returns:
        [R, Hv, Dv] in mixed's dtype.
    """
    (query, key, value), (decay, beta) = heads_of(mixed, key_heads, states), gates(a, b, a_log, dt_bias)
    state = states[seats] * decay.exp()[..., None, None]
    change = (value - torch.einsum("rhkv,rhk->rhv", state, key)) * beta.unsqueeze(-1)
    state = state + key.unsqueeze(-1) * change.unsqueeze(-2)
    states[seats] = state.to(states.dtype)
    return torch.einsum("rhkv,rhk->rhv", state, query).to(mixed.dtype)


def conv_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """silu(conv(x)) of rows x [D, L, C] that begin here; arguments as in `conv_step_`."""
    size = weight.shape[-1]
    weight, bias = weight.to(x.dtype).unsqueeze(1), None if bias is None else bias.to(x.dtype)
    padded = F.pad(x.transpose(1, 2), (size - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=x.shape[-1])).transpose(1, 2)


def delta_rows(
    mixed: Tensor, decay: Tensor, beta: Tensor, real: Tensor, states: Tensor, key_heads: int
) -> tuple[Tensor, Tensor]:
    """The recurrence over rows that begin here.

    Args:
        mixed: [D, L, C], as in `delta_step_`.
        decay, beta: g and β in fp32 (fp64) [D, L, Hv].
        real: bool [D, L]: tokens that count.
        states: [S, Hv, Dk, Dv], whose shape is looked at.

    Returns:
        [D, L, Hv, Dv] in mixed's dtype, and the states behind each row [D, Hv, Dk, Dv] in fp32 (fp64).
    """
    rows, length, _ = mixed.shape
    short = -length % CHUNK
    real = F.pad(real, (0, short)).unsqueeze(-1)
    decay, beta = (F.pad(each, (0, 0, 0, short)).where(real, 0) for each in (decay, beta))
    heads = heads_of(F.pad(mixed, (0, 0, 0, short)), key_heads, states)

    def chunks(x: Tensor) -> Tensor:
        """[D, Hv, chunks, CHUNK, ...] of [D, L, Hv, ...]."""
        return x.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    query, key, value = map(chunks, heads)
    sums, beta = chunks(decay).cumsum(-1), chunks(beta).unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=mixed.device).tril()
    fade = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(~lower, -torch.inf).exp_()
    mixing = (beta * (key @ key.mT) * fade).tril_(-1)  # the diagonal, 1, is not read
    wanted = torch.cat([beta * value, beta * sums.exp().unsqueeze(-1) * key], -1)
    wanted = torch.linalg.solve_triangular(mixing, wanted, upper=False, unitriangular=True)
    own, of_state = wanted.split([value.shape[-1], key.shape[-1]], -1)
    seen, last = (query @ key.mT) * fade, sums[..., -1:]
    query, key = query * sums.exp().unsqueeze(-1), key * (last - sums).exp().unsqueeze(-1)
    state, outs = value.new_zeros(rows, *states.shape[1:]), []
    for at in range(query.shape[2]):
        change = own[:, :, at] - of_state[:, :, at] @ state
        outs.append(query[:, :, at] @ state + seen[:, :, at] @ change)
        state = state * last[:, :, at].exp().unsqueeze(-1) + key[:, :, at].mT @ change
    out = torch.stack(outs, 2).movedim(1, 3).flatten(1, 2)[:, :length]
    return out.to(mixed.dtype), state
