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
from ..families import ACTIVATIONS, Family, scaled
from .projections import dropout_of, project, read_together
from .recipes import recipe_of

FAMILY = "_halfbyte_family"  # the attribute that marks a patched module and holds its row


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(hidden_states, self.weight, epsilon(self), getattr(self, FAMILY).norm_offset)


def epsilon(norm: Any) -> float:
    """What a norm adds to the mean square: Llama's and Gemma's classes name it differently."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def _add_norm(norm: Any, x: Tensor, residual: Tensor | None, reader: Any) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), in one kernel where the norm is a patched one that nobody watches.

    In FP8 the products of `reader`, an attention or MLP, get the norm cast.
    """
    family = getattr(norm, FAMILY, None)
    if residual is not None and residual.dtype != x.dtype:  # under autocast: fp32 embeddings, 16-bit products
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    if family is not None and not norm._forward_hooks and not norm._forward_pre_hooks:
        recipe = recipe_of(reader, "first")
        recipe = recipe if isinstance(recipe, Fp8Products) else None
        return add_rms_norm(x, residual, norm.weight, epsilon(norm), family.norm_offset, recipe)
    total = x if residual is None else residual + x
    return norm(total), total


def attention_half(self: Any, hidden_states: Tensor, again: Store | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(what attention adds to the residual stream, the residual stream) of a decoder layer.

    Args:
        again: where all that is saved waits but the norm's result, which is computed again in backward; None: kept.
    """
    family: Family = getattr(self, FAMILY)
    normed, residual = _add_norm(self.input_layernorm, hidden_states, None, self.self_attn)
    with _again(again, self.input_layernorm, normed, residual):
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
    if family.residual_dropout and self.resid_attn_dropout.p:
        attended = self.resid_attn_dropout(attended)
    if family.sandwich:
        attended = self.post_attention_layernorm(attended)
    return scaled(attended, family.residual_scale, self.self_attn.config), residual


def mlp_half(
    self: Any, x: Tensor, residual: Tensor | None, again: Store | None = None, output: bool = True
) -> tuple[Tensor, Tensor]:
    """(the residual stream with `x` added, what the MLP adds to it).

    Args:
        again: as in `attention_half`.
        output: False where the second is not looked at: its last product is then left out where that can be.
    """
    family: Family = getattr(self, FAMILY)
    norm = self.pre_feedforward_layernorm if family.sandwich else self.post_attention_layernorm
    normed, residual = _add_norm(norm, x, residual, self.mlp)
    options = {} if output or not _may_skip(self, family) else {"output": False}
    with _again(again, norm, normed, residual):
        out = self.mlp(normed, **options)
    if family.sandwich:
        out = self.post_feedforward_layernorm(out)
    if family.residual_dropout and self.resid_mlp_dropout.p:
        out = self.resid_mlp_dropout(out)
    return residual, scaled(out, family.residual_scale, self.self_attn.config)


def _may_skip(layer: Any, family: Family) -> bool:
    """Whether nothing reads the MLP's result but the residual stream."""
    followed = family.sandwich or family.residual_scale or (family.residual_dropout and layer.resid_mlp_dropout.p)
    return not followed and FAMILY in layer.mlp.__dict__ and not layer.mlp._forward_hooks


def _again(store: Store | None, norm: Any, normed: Tensor, residual: Tensor) -> contextlib.AbstractContextManager[None]:
    """Whoever saves `normed` inside keeps the stream it came from, where the norm is a patched one."""
    if store is None or not torch.is_grad_enabled() or FAMILY not in norm.__dict__:
        return contextlib.nullcontext()
    family = getattr(norm, FAMILY)
    function = partial(rms_norm, weight=norm.weight, eps=epsilon(norm), offset=family.norm_offset)
    return computed_again(normed, residual.detach(), function, store)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Projections with their adapters, RoPE (and the norms of q and k), transformers' attention, output projection."""
    family: Family = getattr(self, FAMILY)
    if past_key_values is not None:
        own = {"position_embeddings": position_embeddings, "past_key_values": past_key_values}
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **own, **kwargs)
    query, key, value = (
        part.view(*hidden_states.shape[:-1], -1, self.head_dim).transpose(1, 2)
        for part in _queries_keys_values(self, family, hidden_states)
    )
    query, key = _rotate(self, family, query, key, *position_embeddings)
    if family.window:
        kwargs["sliding_window"] = getattr(self.config if family.window == "config" else self, "sliding_window", None)
    if family.softcap:
        kwargs["softcap"] = self.attn_logit_softcapping
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
    out = out.reshape(*hidden_states.shape[:-1], -1)
    return project(out, self.o_proj, recipe=recipe_of(self, "second"))[0], weights


def _queries_keys_values(self: Any, family: Family, hidden_states: Tensor) -> tuple[Tensor, ...]:
    recipe = recipe_of(self, "first")
    if not family.fused:
        return project(hidden_states, self.q_proj, self.k_proj, self.v_proj, recipe=recipe)
    queries, keys = self.config.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
    return project(hidden_states, self.qkv_proj, recipe=recipe)[0].split((queries, keys, keys), dim=-1)


def _rotate(self: Any, family: Family, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, H, T, D] by position."""
    if not family.qk_norm:
        return rope(query, key, cos, sin)
    norms = (self.q_norm, self.k_norm)
    if all(hasattr(norm, FAMILY) and not norm._forward_hooks for norm in norms):
        weights = (self.q_norm.weight, self.k_norm.weight)
        return qk_norm_rope(query, key, *weights, cos, sin, epsilon(self.q_norm), family.norm_offset)
    return rope(self.q_norm(query), self.k_norm(key), cos, sin)


def mlp_forward(self: Any, hidden_states: Tensor, output: bool = True) -> Tensor:
    """The gated MLP, in one function with its adapters where they are plain; `output` as in `lora_mlp`."""
    family: Family = getattr(self, FAMILY)
    activation = ACTIVATIONS[getattr(self.config, family.activation)]
    recipes = recipe_of(self, "first"), recipe_of(self, "second")
    if family.fused:
        gate, up = project(hidden_states, self.gate_up_proj, recipe=recipes[0])[0].chunk(2, dim=-1)
        return project(glu(gate, up, activation), self.down_proj, recipe=recipes[1])[0]
    read = read_together((self.gate_proj, self.up_proj, self.down_proj))
    if read is None:
        gate, up = project(hidden_states, self.gate_proj, self.up_proj, recipe=recipes[0])
        return project(glu(gate, up, activation), self.down_proj, recipe=recipes[1])[0]
    (gate, up, down), biases, loras, _ = zip(*read, strict=True)
    return lora_mlp(hidden_states, gate, up, down, biases, loras, activation, dropout_of(read), output, recipes)
