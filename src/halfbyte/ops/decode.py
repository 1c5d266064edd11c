"""One new token of each sequence: attention over a static key-value cache, and decoder layers with packed weights.

The cache has more slots than tokens. Sequence b uses slots [firstᵦ, last], where firstᵦ is the first slot after the
prompt's left padding. `last` is a tensor, so a captured CUDA graph reads its current value.

With few sequences a step is bound by reading the weights and by the gaps between kernels: a layer of Llama's shape has
some fourteen kernels of a few microseconds each. Where a device runs all layers as one kernel, `one_launch` returns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import op
from ..formats.linear import PackedProduct, add_term, linear_rows
from .glu import glu
from .norms import rms_norm
from .rope import norm_rotate, rotate


def store(cache: Tensor, slots: Tensor, new: Tensor) -> None:
    """Write new [B, H, T, D] to slots [T] of a cache [B, H, S, D]; float8_e4m3fn clamps values to ±448."""
    if cache.dtype is torch.float8_e4m3fn:  # indexed as bytes: torch does not index FP8 on any device
        limit = torch.finfo(cache.dtype).max
        cache, new = cache.view(torch.uint8), new.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
    cache.index_copy_(2, slots, new)


@op("triton.cached_attention")
def store_both_(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """`store` one token's keys and values [B, H, 1, D] in their caches."""
    store(keys, slots, k)
    store(values, slots, v)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of scores [..., H, T, S], with optional learned sinks [H]."""
    if sinks is None:
        return scores.softmax(-1)
    sink_scores = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink_scores], -1).softmax(-1)[..., :-1]


@op("triton.cached_attention")
def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(cap(scale · q·Kᵀ))·V over the slots in use.

    Args:
        q: [B, Hq, 1, D]; fp32, fp16 or bf16.
        keys, values: [B, Hk, S, D] in q's dtype or float8_e4m3fn, Hk dividing Hq.
        first: int32 [B].
        last: int64 [1], the newest token's slot.
        scale: factor of q·k.
        window: slots that a token attends to, its own included; None: all.
        softcap: scores s become softcap · tanh(s / softcap); None: no cap.
        sinks: [Hq] learned sinks, an extra score per head whose value is 0; None: no sinks.

    Returns:
        [B, Hq, 1, D] in q's dtype.
    """
    batch, heads, _, size = q.shape
    slot = torch.arange(keys.shape[2], device=q.device)
    seen = (slot >= first.unsqueeze(1)) & (slot <= last)
    if window is not None:
        seen &= slot > last - window
    grouped = q.view(batch, keys.shape[1], -1, size)
    scores = (grouped @ keys.to(q.dtype).transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill_(~seen.view(batch, 1, 1, -1), -torch.inf)
    weights = softmax(scores.view(batch, heads, 1, -1), sinks).view_as(scores)
    return (weights.to(q.dtype) @ values.to(q.dtype)).view(batch, heads, 1, size)


@op("cuda.low_rank")
def low_rank_rows(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """u = x·Aᵀ, where each row of x may skip rows of A.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        a: [R, K] in x's dtype.
        mask: [M, R] of zeros and ones in x's dtype, or None.

    Returns:
        [M, R] in x's dtype.
    """
    u = linear_rows(x, a)
    return u if mask is None else u * mask


@dataclass(frozen=True)
class PackedLinear:
    """A linear of `columns` inputs and `rows` outputs with a packed weight."""

    product: PackedProduct
    rows: int
    columns: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, None if self.bias is None else self.bias.to(x.dtype))


Term = tuple[Tensor, Tensor]  # an adapter's u [M, r] with any row stride, and B [N, r]


@op("cuda.gemv4_row", "cuda.gemm4", "cuda.linear_planes", "cuda.few_rows")
def packed_linears(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[Term | None]) -> list[Tensor]:
    """Linears of one x with adapters' terms, yᵢ = x·Wᵢᵀ + bᵢ + uᵢ·Bᵢᵀ; no gradient.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        terms: for each linear, in x's dtype, or None.

    Returns:
        [M, Nᵢ] in x's dtype.
    """
    return [add_term(linear(x), term) for linear, term in zip(linears, terms, strict=True)]


@dataclass(frozen=True)
class Projections:
    """Linears of one input with batched adapters: yᵢ = x·Wᵢᵀ + bᵢ + (mask ∘ x·Aᵀ)[:, beginᵢ:]·Bᵢᵀ.

    Args:
        weights: one or more, with the same K.
        down: A [R, K] of all linears and adapters, or None. Kernels need R a multiple of 16 and each rank a multiple of
            8; the padding is zeros.
        ups: for each weight (beginᵢ, Bᵢ [Nᵢ, r], scaled), or None.
        mask: [batch, R], 1 where a sequence uses the adapter of a row of A; None: 1 everywhere.
    """

    weights: Sequence[PackedLinear]
    down: Tensor | None
    ups: Sequence[tuple[int, Tensor] | None]
    mask: Tensor | None

    @property
    def columns(self) -> int:
        """K."""
        return self.weights[0].columns

    def __call__(self, x: Tensor) -> list[Tensor]:
        """[batch, Nᵢ] each for x [batch, K]."""
        out = [weight(x) for weight in self.weights]
        if self.down is not None:
            u = x @ self.down.to(x.dtype).T
            u = u if self.mask is None else u * self.mask.to(x.dtype)
            for i, up in enumerate(self.ups):
                if up is not None:
                    begin, b = up
                    out[i] = out[i] + u[:, begin : begin + b.shape[1]] @ b.to(x.dtype).T
        return out


@dataclass(frozen=True)
class DecoderLayer:
    """One Llama block: RMSNorm, attention with RoPE, RMSNorm, SwiGLU; optionally QK-norm and a sliding window.

    Args:
        qkv: three linears.
        out, down: one linear each.
        gate_up: two linears.
        norm, post_norm: [width], before attention and before the MLP.
        q_norm, k_norm: [D], RMSNorm weights of q and k before RoPE (Qwen 3), or None.
        keys, values: the cache [batch, Hk, S, D], in the norms' dtype or float8_e4m3fn.
        window: slots that a token attends to, its own included; None: all.
    """

    qkv: Projections
    out: Projections
    gate_up: Projections
    down: Projections
    norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    keys: Tensor
    values: Tensor
    window: int | None


@dataclass(frozen=True)
class Stack:
    """Decoder layers and the tensors that they share.

    Args:
        eps: epsilon of all norms.
        scale: factor of q·k.
        cos, sin: [S, D], for every position.
        padding: int32 [batch], the first slot of each sequence, which has position 0.
        slot: int64 [1], the new token's slot.
    """

    layers: Sequence[DecoderLayer]
    heads: int
    eps: float
    scale: float
    cos: Tensor
    sin: Tensor
    padding: Tensor
    slot: Tensor


Run = Callable[[Tensor], Tensor]


def decode_layers(hidden: Tensor, stack: Stack) -> Tensor:
    """The residual stream [batch, width] after all layers. Writes the new keys and values into the caches."""
    position = (stack.slot - stack.padding).unsqueeze(1)
    cos, sin = stack.cos[position], stack.sin[position]
    for layer in stack.layers:
        size = layer.keys.shape[3]
        q, k, v = (
            y.unflatten(1, (-1, size)).unsqueeze(2)
            for y in layer.qkv(rms_norm(hidden, None, layer.norm, stack.eps, False)[0])
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q = norm_rotate(q, layer.q_norm, cos, sin, stack.eps, False)
            k = norm_rotate(k, layer.k_norm, cos, sin, stack.eps, False)
        else:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        store(layer.keys, stack.slot, k)
        store(layer.values, stack.slot, v)
        out = decode_attention(q, layer.keys, layer.values, stack.padding, stack.slot, stack.scale, layer.window, None)
        hidden = hidden + layer.out(out.flatten(1))[0]
        gate, up = layer.gate_up(rms_norm(hidden, None, layer.post_norm, stack.eps, False)[0])
        hidden = hidden + layer.down(glu(gate, up, "silu"))[0]
    return hidden


@op("cuda.decode_layers", "native.decode4")
def one_launch(hidden: Tensor, stack: Stack) -> Run | None:
    """Return `decode_layers` of this stack as one kernel for inputs like `hidden`, or None if there is no kernel.

    The returned function may be captured in a CUDA graph; each call overwrites the last call's result. On a CPU it uses
    the norms, biases and adapters as they are now: those that are not fp32 are copied.
    """
    return None
