"""One new token of each row through decoder layers with 4-bit weights: the specification of generation's step.

With few rows a step is bound by reading the weights, and by what lies between two reads: a layer of Llama's shape is
some fourteen kernels, each of a few microseconds. A device may have all layers as one, and `one_launch` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import op
from .decode_attention import decode_attention, store
from .gemv4 import linear_blockwise4
from .glu import glu
from .norms import rms_norm
from .rope import norm_rotate, rotate


@dataclass(frozen=True)
class Weight4:
    """A 4-bit linear."""

    packed: Tensor
    absmax: Tensor
    nested: tuple[Tensor, Tensor, Tensor] | None
    blocksize: int
    quant_type: str
    rows: int
    bias: Tensor | None

    def given(self, dtype: torch.dtype) -> tuple:
        """`linear_blockwise4`'s arguments after x of `dtype`."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return self.packed, self.absmax, self.nested, self.blocksize, self.quant_type, self.rows, bias

    def __call__(self, x: Tensor) -> Tensor:
        return linear_blockwise4(x, *self.given(x.dtype))


@dataclass(frozen=True)
class Projections:
    """Linears of one input with the adapters of all rows: yᵢ = x·Wᵢᵀ + bᵢ + (mask ∘ x·Aᵀ)[:, beginᵢ:]·Bᵢᵀ.

    Args:
        weights: one or more, of one width K.
        down: A [R, K] of all linears and adapters, or None. Kernels take R in sixteens, and ranks of a linear in
            eights; what is left is zeros.
        ups: for each weight (beginᵢ, Bᵢ [Nᵢ, r], scaled), or None.
        mask: [batch, R], 1 where a row of x has the adapter of a row of A; None for 1 everywhere.
    """

    weights: Sequence[Weight4]
    down: Tensor | None
    ups: Sequence[tuple[int, Tensor] | None]
    mask: Tensor | None

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
    """RMSNorm, attention with rotary positions, RMSNorm, SwiGLU; Llama's block, and what others add to its attention.

    Args:
        qkv: three linears.
        out, down: one.
        gate_up: two.
        norm, post_norm: [width], before attention and before the gated unit.
        q_norm, k_norm: [D], of q and k before their rotation (Qwen 3); None for none.
        keys, values: the cache [batch, Hk, S, D], in the norms' dtype or float8_e4m3fn.
        window: slots that a token sees, its own among them; None for all.
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
    """The layers and what they share.

    Args:
        eps: of all norms.
        scale: of the scores.
        cos, sin: [S, D] of every position.
        padding: int32 [batch]: each row's first slot, whose position is 0.
        slot: int64 [1]: the new token's.
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
    """The residual stream [batch, width] after all layers, from what enters. Caches get the new keys and values."""
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


@op("cuda.decode_layers", "native.decode_layers")
def one_launch(hidden: Tensor, stack: Stack) -> Run | None:
    """`decode_layers` of this stack as one kernel for inputs like `hidden`, or None where there is none.

    What it returns may be captured in a CUDA graph; its results share memory with those of its next call. On a CPU it
    computes with the norms, biases and adapters as they are now: what is not fp32 is copied.
    """
    return None
