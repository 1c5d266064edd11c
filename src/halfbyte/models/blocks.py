"""The forwards that `halfbyte.patch` binds to a model's modules: one decoder block for all families, minus their rows.

Each takes what transformers' forward of that module takes and returns the same. A key-value cache belongs to generation
and is left to transformers' own forward, as is anything else that training does not need.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..autograd.glu import glu
from ..autograd.linear_fp8 import Fp8Products
from ..autograd.lora_mlp import lora_mlp
from ..autograd.norms import add_rms_norm, rms_norm
from ..autograd.recompute import Store, computed_again
from ..autograd.rope import qk_norm_rope, rope
from ..families import Family
from ..parallel.tensor import Leaving
from . import layer
from .layer import Attention, GatedMLP, Half, epsilon
from .patched import NAME, is_bound
from .projections import dropout_of, project, read_together
from .recipes import recipes_of


def _family(module: Any) -> Family:
    """The row of a patched module; also through PEFT's wrapper of a norm that is trained whole."""
    return getattr(module, NAME).family


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(hidden_states, *_numbers(self))


def _numbers(norm: Any) -> tuple[Tensor, float, bool]:
    """Weight, epsilon, and whether 1 is added to the weight."""
    return norm.weight, epsilon(norm), _family(norm).norm_offset


def _is_fused(norm: Any) -> bool:
    """Whether a norm is a patched one that nobody watches."""
    return hasattr(norm, NAME) and not norm._forward_hooks and not norm._forward_pre_hooks


def _enter(half: Half, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), in one kernel where the norm is fused.

    In FP8 the products of attention or the MLP get the norm cast.
    """
    norm = half.norm
    if residual is not None and residual.dtype != x.dtype:  # under autocast: fp32 embeddings, 16-bit products
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    if _is_fused(norm):
        recipe = recipes_of(half.inner)[0]
        return add_rms_norm(x, residual, *_numbers(norm), recipe if isinstance(recipe, Fp8Products) else None)
    total = x if residual is None else residual + x
    return norm(total), total


def _leave(half: Half, x: Tensor) -> Tensor:
    """What joins the residual stream."""
    if half.dropout is not None and half.dropout.p:
        x = half.dropout(x)
    x = x if half.leave is None else half.leave(x)
    return x if half.scale == 1 else x * half.scale


def attention_half(self: Any, hidden_states: Tensor, again: Store | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(what attention adds to the residual stream, the residual stream) of a decoder layer.

    Args:
        again: where all that is saved waits but the norm's result, which is computed again in backward; None: kept.
    """
    half = layer.attention_half(self, _family(self))
    normed, residual = _enter(half, hidden_states, None)
    with _again(again, half.norm, normed, residual):
        attended, _ = half.inner(hidden_states=normed, **kwargs)
    return _leave(half, attended), residual


def mlp_half(
    self: Any, x: Tensor, residual: Tensor | None, again: Store | None = None, output: bool = True
) -> tuple[Tensor, Tensor]:
    """(the residual stream with `x` added, what the MLP adds to it).

    Args:
        again: as in `attention_half`.
        output: False where the second is not looked at: its last product is then left out where that can be.
    """
    half = layer.mlp_half(self, _family(self))
    normed, residual = _enter(half, x, residual)
    options = {} if output or not _may_skip(half) else {"output": False}
    with _again(again, half.norm, normed, residual):
        out = half.inner(normed, **options)
    return residual, _leave(half, out)


def _may_skip(half: Half) -> bool:
    """Whether nothing reads the MLP's result but the residual stream."""
    dropped = half.dropout is not None and half.dropout.p
    untouched = not dropped and half.leave is None and half.scale == 1
    watched = any(not isinstance(hook, Leaving) for hook in half.inner._forward_hooks.values())
    return untouched and is_bound(half.inner) and not watched


def _again(store: Store | None, norm: Any, normed: Tensor, residual: Tensor) -> contextlib.AbstractContextManager[None]:
    """Whoever saves `normed` inside keeps the stream it came from, where the norm is a patched one."""
    if store is None or not torch.is_grad_enabled() or not is_bound(norm):
        return contextlib.nullcontext()
    weight, eps, offset = _numbers(norm)
    return computed_again(normed, residual.detach(), partial(rms_norm, weight=weight, eps=eps, offset=offset), store)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Projections with their adapters, RoPE (and the norms of q and k), transformers' attention, output projection."""
    if past_key_values is not None:
        own = {"position_embeddings": position_embeddings, "past_key_values": past_key_values}
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **own, **kwargs)
    view, recipes = Attention.of(self, _family(self)), recipes_of(self)
    query, key, value = (
        part.view(*hidden_states.shape[:-1], -1, view.head_dim).transpose(1, 2)
        for part in view.split(project(hidden_states, *view.inputs, recipe=recipes[0]))
    )
    query, key = _rotate(view, query, key, *position_embeddings)
    own = {"sliding_window": view.window, "softcap": view.softcap}
    kwargs |= {name: value for name, value in own.items() if value is not None}
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = view.dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=view.scaling, **kwargs)
    out = out.reshape(*hidden_states.shape[:-1], -1)
    return project(out, view.output, recipe=recipes[1])[0], weights


def _rotate(view: Attention, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, H, T, D] by position."""
    if view.norms is None:
        return rope(query, key, cos, sin)
    q_norm, k_norm = view.norms
    if _is_fused(q_norm) and _is_fused(k_norm):
        weight, eps, offset = _numbers(q_norm)
        return qk_norm_rope(query, key, weight, k_norm.weight, cos, sin, eps, offset)
    return rope(q_norm(query), k_norm(key), cos, sin)


def mlp_forward(self: Any, hidden_states: Tensor, output: bool = True) -> Tensor:
    """The gated MLP, in one function with its adapters where they are plain; `output` as in `lora_mlp`."""
    view, recipes = GatedMLP.of(self, _family(self)), recipes_of(self)
    read = read_together((*view.inputs, view.output)) if len(view.linears) == 3 else None
    if read is None:
        gate, up = view.split(project(hidden_states, *view.inputs, recipe=recipes[0]))
        return project(glu(gate, up, view.activation), view.output, recipe=recipes[1])[0]
    (gate, up, down), biases, loras, _ = zip(*read, strict=True)
    return lora_mlp(hidden_states, gate, up, down, biases, loras, view.activation, dropout_of(read), output, recipes)
