"""The forwards that `halfbyte.patch` binds to a model's modules: one decoder block for all families, minus their rows.

Each takes what transformers' forward of that module takes and returns the same. A key-value cache belongs to generation
and is left to transformers' own forward, as is anything else that training does not need.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..autograd.checkpointing import Store, recompute_from
from ..autograd.linear_fp8 import Fp8Gemms
from ..autograd.lora_mlp import glu, lora_mlp
from ..autograd.norms import add_rms_norm, layer_norm, rms_norm
from ..autograd.rope import qk_norm_rope, rope
from ..layers.plain import hooked
from ..parallel.tensor.layers import Leaving
from . import layer, recurrent
from .families import Family
from .keywords import CACHES, cache_of, check_known
from .layer import MLP, Attention, Half, TokenMixer, epsilon, mixer
from .patch_record import NAME, is_bound
from .projections import dropout_of, project, read_together
from .recipes import recipes_of

# Arguments that `attend`, or transformers' attention, reads.
ATTEND = frozenset({
    "sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "max_length_q", "document_spans", "context", "sharing",
})  # fmt: skip
OF_ATTENTION = ("position_embeddings", "position_ids", *CACHES)  # arguments that no other mixer takes


def _family(module: Any) -> Family:
    """The row of a patched module; also through PEFT's wrapper of a norm that is trained whole."""
    return getattr(module, NAME).family


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(hidden_states, *_numbers(self))


def layer_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """LayerNorm without a bias."""
    return layer_norm(hidden_states, self.weight, torch.zeros_like(self.weight), epsilon(self))


def mixer_of(layer: Any) -> Any:
    """What mixes the tokens of a patched layer."""
    return mixer(layer, _family(layer))


def runs_parallel(layer: Any) -> bool:
    """Whether a layer's attention and MLP read the same."""
    return _family(layer).parallel


def _numbers(norm: Any) -> tuple[Tensor, float, bool]:
    """Weight, epsilon, and whether 1 is added to the weight."""
    return norm.weight, epsilon(norm), _family(norm).norm_offset


def _is_fused(norm: Any) -> bool:
    """Whether a norm is a patched RMSNorm that nobody watches."""
    if norm is None or not hasattr(norm, NAME) or _family(norm).layer_norm:
        return False
    return not norm._forward_hooks and not norm._forward_pre_hooks


def _enter(half: Half, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), in one kernel where the norm is fused.

    In FP8 the products of attention or the MLP get the norm cast.
    """
    norm: Any = half.norm
    if residual is not None and residual.dtype != x.dtype:  # under autocast: fp32 embeddings, 16-bit products
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    if _is_fused(norm):
        recipe = recipes_of(half.inner)[0]
        return add_rms_norm(x, residual, *_numbers(norm), recipe if isinstance(recipe, Fp8Gemms) else None)
    total = x if residual is None else residual + x
    return (total if norm is None else norm(total)), total


def _leave(half: Half, x: Tensor) -> Tensor:
    """What joins the residual stream."""
    x = F.dropout(x, half.dropout) if half.dropout else x
    x = x if half.leave is None else half.leave(x)
    return x if half.scale == 1 else x * half.scale


def attention_half(self: Any, hidden_states: Tensor, again: Store | None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """(what attention adds to the residual stream, the residual stream) of a decoder layer.

    Args:
        again: where all that is saved waits but the norm's result, which is computed again in backward; None: kept.
    """
    half = layer.attention_half(self, _family(self))
    attends = half.inner is getattr(self, "self_attn", None)
    normed, residual = _enter(half, hidden_states, None)
    with _again(again, half.norm, normed, residual):
        if attends:
            attended, _ = half.inner(hidden_states=normed, **kwargs)
        else:
            attended = half.inner(normed, **{key: value for key, value in kwargs.items() if key not in OF_ATTENTION})
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
    out = out[0] if isinstance(out, tuple) else out  # a mixture's, with its router's scores
    return residual, _leave(half, out)


def _may_skip(half: Half) -> bool:
    """Whether nothing reads the MLP's result but the residual stream."""
    untouched = not half.dropout and half.leave is None and half.scale == 1
    watched = any(not isinstance(hook, Leaving) for hook in half.inner._forward_hooks.values())
    return untouched and is_bound(half.inner) and not watched


def _again(store: Store | None, norm: Any, normed: Tensor, residual: Tensor) -> contextlib.AbstractContextManager[None]:
    """Whoever saves `normed` inside keeps the stream it came from, where the norm is a patched one."""
    if store is None or not torch.is_grad_enabled() or norm is None or not is_bound(norm):
        return contextlib.nullcontext()
    return recompute_from(normed, residual.detach(), partial(_normed, norm), store)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """A patched norm of x, past its hooks."""
    return (layer_norm_forward if _family(norm).layer_norm else norm_forward)(norm, x)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    shared_kv_states: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Projections with their adapters, RoPE (and the norms of q and k), transformers' attention, output projection."""
    if cache_of(kwargs):
        own: dict[str, Any] = {} if position_embeddings is None else {"position_embeddings": position_embeddings}
        own |= {"shared_kv_states": shared_kv_states} if _family(self).shares_keys else {}
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **own, **kwargs)
    check_known(self, kwargs, ATTEND)
    view, recipes = Attention.of(self, _family(self)), recipes_of(self)
    outputs = project(hidden_states, *view.inputs, recipe=recipes[0])
    gate = None
    if view.family.shares_keys:
        query, key, value = _shared(self, view, outputs, position_embeddings, shared_kv_states)
    else:
        query, key, value, gate = view.heads_of(outputs, lambda norm, x: norm(x))
        if view.query_scale is not None:
            query = view.scaled(query, kwargs["position_ids"])
        query, key = _rotate(view, query, key, position_embeddings)
    own = {"sliding_window": view.window, "softcap": view.softcap, "s_aux": view.sinks}
    kwargs |= {name: value for name, value in own.items() if value is not None}
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = view.dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=view.scaling, **kwargs)
    out = out.reshape(*hidden_states.shape[:-1], -1)
    out = out if gate is None else out * gate.sigmoid()
    return _dropped(self, project(out, view.output, recipe=recipes[1])[0]), weights


def _shared(
    module: Any, view: Attention, outputs: Sequence[Tensor], angles: Any, states: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, H, T, D] by position, of a layer whose keys and values may be an earlier one's.

    Args:
        outputs: of q_proj; of k_proj, too, where the keys are its own; of v_proj, where the values are not the keys'.
        states: type of layer, or its number → k and v of the last layer that has its own, which puts them in.
    """
    query, *own = (x.unflatten(-1, (-1, view.head_dim)).transpose(1, 2) for x in outputs)
    numbered = hasattr(module, "kv_shared_layer_index")  # transformers 5.17 keeps Gemma 3n's by the layer's number
    if own:
        value = module.v_norm(own[-1])
        query, key = _rotate(view, query, own[0], angles)
    else:
        query, _ = _rotate(view, query, query[:, :0], angles)
        key, value = states[module.kv_shared_layer_index if numbered else module.layer_type]
    if module.store_full_length_kv:
        states[module.layer_idx if numbered else module.layer_type] = key, value
    return query, key, value


def _dropped(module: Any, x: Tensor) -> Tensor:
    """The result of attention or an MLP, in families where these drop of it themselves."""
    return F.dropout(x, module.residual_dropout, module.training) if _family(module).residual_dropout == "half" else x


def _rotate(view: Attention, query: Tensor, key: Tensor, angles: Any) -> tuple[Tensor, Tensor]:
    """q and k [B, H, T, D] by position, each head normalised first where the layer does that.

    Args:
        angles: cos and sin; None where the model has none for this layer.
    """
    norms, turned = view.head_norms, angles is not None and view.rotates
    if norms is not None:
        whole = turned and view.family.rope_pairs == "halves" and angles[0].shape[-1] == view.head_dim
        if whole and all(_is_fused(norm) for norm in norms):
            (weight, eps, offset), (cos, sin) = _numbers(norms[0]), angles
            return qk_norm_rope(query, key, weight, norms[1].weight, cos, sin, eps, offset)
        query, key = norms[0](query), norms[1](key)
    return rope(*view.in_halves(query, key, *angles)) if turned else (query, key)


class _With:
    """A module as its own forward sees it, some of its parts replaced."""

    def __init__(self, module: Any, parts: dict[str, Any]):
        self._module, self._parts = module, parts

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__["_parts"]
        return parts[name] if name in parts else getattr(self.__dict__["_module"], name)


def mixer_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """transformers' forward of a recurrence, its linears of one input computed together, and its gated norm."""
    if cache_of(kwargs):
        return type(self).forward(self, hidden_states, **kwargs)
    forward = recurrent.forward_of(type(self), recurrent.documents_of(kwargs, *hidden_states.shape[:2]))
    view, recipes = TokenMixer.of(self, _family(self)), recipes_of(self)
    *inputs, output = view.linears
    made: dict[str, Tensor] = {}

    def projected(name: str, x: Tensor) -> Tensor:
        if not made:  # its forward may put padding to zero first, so x is not ours to know
            made.update(zip(inputs, project(x, *view.inputs, recipe=recipes[0]), strict=True))
        return made.pop(name)

    def gated_norm(x: Tensor, gate: Tensor) -> Tensor:
        return glu(gate, rms_norm(x, view.norm.weight, epsilon(view.norm)), "silu")

    parts: dict[str, Any] = {name: partial(projected, name) for name in inputs}
    parts[output] = lambda x: project(x, view.output, recipe=recipes[1])[0]
    if not hooked(view.norm):
        parts[view.norm_name] = gated_norm
    return forward(_With(self, parts), hidden_states, **recurrent.without_bounds(kwargs))


def mlp_forward(self: Any, hidden_states: Tensor, output: bool = True) -> Tensor:
    """The MLP, a gated one in one function with its adapters where they are plain; `output` as in `lora_mlp`."""
    view, recipes = MLP.of(self, _family(self)), recipes_of(self)
    read = read_together((*view.inputs, view.output)) if len(view.linears) == 3 else None
    if read is None:
        hidden = view.act_on(project(hidden_states, *view.inputs, recipe=recipes[0]), glu)
        return _dropped(self, project(hidden, view.output, recipe=recipes[1])[0])
    (gate, up, down), biases, loras, _ = zip(*read, strict=True)
    dropout, named = dropout_of(read), view.activation
    return _dropped(self, lora_mlp(hidden_states, gate, up, down, biases, loras, named, dropout, output, recipes))
