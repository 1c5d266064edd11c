"""Fused forwards that `halfbyte.patch` binds to a model's norms, attention, token mixers and MLPs.

Each takes the arguments of transformers' forward and returns the same. Calls with a key-value cache (generation), and
anything else that training does not need, run transformers' own forward.
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
from ..autograd.dora import Scale, join
from ..autograd.linear_fp8 import Fp8Gemms
from ..autograd.lora import OutputUse
from ..autograd.lora_mlp import glu, lora_mlp
from ..autograd.norms import add_rms_norm, layer_norm, rms_norm
from ..autograd.rope import qk_norm_rope, rope
from ..dispatch import on_compiler
from ..layers.plain import hooked
from ..mesh.sharded_linears import OutputHook
from . import layer, recurrent
from .families import Family
from .layer import (
    MLP,
    Attention,
    Half,
    TokenMixer,
    check_keywords,
    epsilon,
    token_mixer,
)
from .patch_record import RECORD, is_bound
from .projections import (
    defer,
    gemm_dtype,
    project,
    project_output,
    project_rotated,
    read_projections,
    recipe_products,
    shared_dropout,
)
from .transformers_versions import CACHE_KEYWORDS, given_cache, shared_states_keys

# Keyword arguments that `attend` or transformers' attention functions read.
ATTENTION_KEYWORDS = frozenset({
    "sliding_window", "softcap", "s_aux", "cu_seq_lens_q", "max_length_q", "document_spans", "context", "sharing",
})  # fmt: skip
NO_SCALES = (None, None)
ATTENTION_ONLY = ("position_embeddings", "position_ids", *CACHE_KEYWORDS)  # not passed to other token mixers


def _family(module: Any) -> Family:
    """Return the family row of a patched module, also through PEFT's wrapper of a fully trained norm."""
    return getattr(module, RECORD).family


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNorm."""
    return rms_norm(hidden_states, *_norm_arguments(self))


def layer_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """LayerNorm without a bias."""
    return layer_norm(hidden_states, self.weight, torch.zeros_like(self.weight), epsilon(self))


def mixer_of(layer: Any) -> Any:
    """Return the token mixer (attention or recurrence) of a patched layer."""
    return token_mixer(layer, _family(layer))


def runs_parallel(layer: Any) -> bool:
    """Return whether attention and MLP of a layer read the same input."""
    return _family(layer).parallel


def _norm_arguments(norm: Any) -> tuple[Tensor, float, bool]:
    """Return weight, epsilon, and whether 1 is added to the weight."""
    return norm.weight, epsilon(norm), _family(norm).norm_offset


def _is_fused(norm: Any) -> bool:
    """Return whether a norm is a patched RMSNorm without hooks."""
    if norm is None or not hasattr(norm, RECORD) or _family(norm).layer_norm:
        return False
    return not norm._forward_hooks and not norm._forward_pre_hooks


def _norm_input(half: Half, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (norm(x + residual), x + residual), from one kernel if the norm is fused.

    With an FP8 recipe, the kernel also casts the norm for the GEMMs of attention or MLP.
    """
    norm: Any = half.norm
    if residual is not None and residual.dtype != x.dtype:  # under autocast: fp32 embeddings, 16-bit matmuls
        wider = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(wider), residual.to(wider)
    if _is_fused(norm):
        recipe = recipe_products(half.inner)[0]
        return add_rms_norm(x, residual, *_norm_arguments(norm), recipe if isinstance(recipe, Fp8Gemms) else None)
    total = x if residual is None else residual + x
    return (total if norm is None else norm(total)), total


def _scale_output(half: Half, x: Tensor) -> Tensor:
    """Apply dropout, output norm and scale to a half's output before it joins the residual stream."""
    x = F.dropout(x, half.dropout) if half.dropout else x
    x = x if half.output_norm is None else half.output_norm(x)
    return x if half.scale == 1 else x * half.scale


def _joins(layer: Any, half: Half) -> bool:
    """Return whether the output of a half's last linear joins the residual stream as it is, in training."""
    family, inner = _family(layer), half.inner
    if not torch.is_grad_enabled() or on_compiler() or family.parallel or family.residual_dropout is not None:
        return False
    return _is_untouched(half) and is_bound(inner) and not inner._forward_hooks


def _is_untouched(half: Half) -> bool:
    """Return whether a half's output joins the residual stream without dropout, norm and scale."""
    return not half.dropout and half.output_norm is None and half.scale == 1


def attention_half(
    self: Any, hidden_states: Tensor, store: Store | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return (attention's addition to the residual stream, the residual stream) of a decoder layer, or their sum, None.

    Args:
        store: saves tensors for backward, and the norm's output is recomputed there; None: the output is saved.
    """
    half = layer.attention_half(self, _family(self))
    attends = half.inner is getattr(self, "self_attn", None)
    scales: list[Scale] | None = [] if attends and _joins(self, half) else None
    normed, residual = _norm_input(half, hidden_states, None)
    with _recompute_norm(store, half.norm, normed, residual):
        if attends:
            options = {} if scales is None else {"scales": scales}
            attended, _ = half.inner(hidden_states=normed, **options, **kwargs)
        else:
            attended = half.inner(normed, **{key: value for key, value in kwargs.items() if key not in ATTENTION_ONLY})
    if scales:
        return join(attended, residual, scales[0]), None
    return _scale_output(half, attended), residual


def mlp_half(
    self: Any, x: Tensor, residual: Tensor | None, store: Store | None = None, output: bool = True
) -> tuple[Tensor, ...]:
    """Return (the residual stream with `x` added, the MLP's addition to it), or their sum alone.

    Args:
        store: as in `attention_half`.
        output: False if the second result is not needed: the down projection is then skipped where possible.
    """
    half = layer.mlp_half(self, _family(self))
    normed, residual = _norm_input(half, x, residual)
    # only the residual stream reads the MLP's output
    has_hooks = any(not isinstance(hook, OutputHook) for hook in half.inner._forward_hooks.values())
    skips = not output and _is_untouched(half) and is_bound(half.inner) and not has_hooks
    options: dict[str, Any] = {"output": False} if skips else {}
    scales: list[Scale] = []
    options |= {"scales": scales} if _joins(self, half) else {}
    with _recompute_norm(store, half.norm, normed, residual):
        out = half.inner(normed, **options)
    out = out[0] if isinstance(out, tuple) else out  # mixtures also return router scores
    return (join(out, residual, scales[0]),) if scales else (residual, _scale_output(half, out))


def _recompute_norm(
    store: Store | None, norm: Any, normed: Tensor, residual: Tensor
) -> contextlib.AbstractContextManager[None]:
    """Inside the context, functions that save `normed` save the residual stream instead, if the norm is patched."""
    if store is None or not torch.is_grad_enabled() or norm is None or not is_bound(norm):
        return contextlib.nullcontext()
    forward = layer_norm_forward if _family(norm).layer_norm else norm_forward  # without its hooks
    return recompute_from(normed, residual.detach(), partial(forward, norm), store)


def attention_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    shared_kv_states: Any = None,
    scales: list[Scale] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run projections with adapters, RoPE (and norms of q and k), transformers' attention, and output projection.

    `scales` is as in `project_output`.
    """
    if given_cache(kwargs):
        kwargs |= {} if position_embeddings is None else {"position_embeddings": position_embeddings}
        kwargs |= {"shared_kv_states": shared_kv_states} if _family(self).shares_keys else {}
        return type(self).forward(self, hidden_states, attention_mask=attention_mask, **kwargs)
    check_keywords(self, kwargs, ATTENTION_KEYWORDS)
    view, recipes = Attention.of(self, _family(self)), recipe_products(self)
    rotates = position_embeddings is not None and view.rotates
    rotated_scales: Sequence[Scale | None] = NO_SCALES
    if rotates and view.rotates_outputs:
        outputs, rotated_scales = project_rotated(hidden_states, *view.inputs, recipe=recipes[0])
    else:
        use: OutputUse = "overwritten" if rotates and view.norms is None else "unchanged"
        outputs = project(hidden_states, *view.inputs, recipe=recipes[0], use=use)
    gate = None
    if view.family.shares_keys:
        # The layer may reuse an earlier layer's keys and values.
        query, *key_values = (x.unflatten(-1, (-1, view.head_dim)).transpose(1, 2) for x in outputs)
        read_key, written_key = shared_states_keys(self)
        if key_values:
            value = self.v_norm(key_values[-1])
            query, key = _rotate(view, query, key_values[0], position_embeddings)
        else:
            query, _ = _rotate(view, query, query[:, :0], position_embeddings)
            key, value = shared_kv_states[read_key]
        if self.store_full_length_kv:
            shared_kv_states[written_key] = key, value
    else:
        query, key, value, gate = view.split_heads(outputs, lambda norm, x: norm(x))
        if view.query_scale is not None:
            query = view.scale_queries(query, kwargs["position_ids"])
        query, key = _rotate(view, query, key, position_embeddings, rotated_scales)
    scores = {"sliding_window": view.window, "softcap": view.softcap, "s_aux": view.sinks}
    kwargs |= {name: value for name, value in scores.items() if value is not None}
    eager = sys.modules[type(self).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
    dropout = view.dropout if self.training else 0.0
    out, weights = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=view.scaling, **kwargs)
    out = out.reshape(*hidden_states.shape[:-1], -1)
    out = out if gate is None else out * gate.sigmoid()
    return _drop_output(self, project_output(out, view.output, recipes[1], scales)), weights


def _drop_output(module: Any, x: Tensor) -> Tensor:
    """Apply dropout to the output of attention or MLP, in families where these modules do it themselves."""
    return F.dropout(x, module.residual_dropout, module.training) if _family(module).residual_dropout == "half" else x


def _rotate(
    view: Attention, query: Tensor, key: Tensor, angles: Any, scales: Sequence[Scale | None] = NO_SCALES
) -> tuple[Tensor, Tensor]:
    """Apply RoPE to q and k [B, H, T, D], after each head's norm if the layer has one.

    Args:
        angles: cos and sin; None if the model has none for this layer.
        scales: as in `rope`.
    """
    norms, rotated = view.head_norms, angles is not None and view.rotates
    if norms is not None:
        full = rotated and view.family.rope_pairs == "halves" and angles[0].shape[-1] == view.head_dim
        if full and all(_is_fused(norm) for norm in norms):
            (weight, eps, offset), (cos, sin) = _norm_arguments(norms[0]), angles
            return qk_norm_rope(query, key, weight, norms[1].weight, cos, sin, eps, offset)
        query, key = norms[0](query), norms[1](key)
    return rope(*view.half_rotation(query, key, *angles), scales) if rotated else (query, key)


class _ModuleView:
    """View of a module that its own forward can run on, with some submodules replaced."""

    def __init__(self, module: Any, replacements: dict[str, Any]):
        self._module, self._parts = module, replacements

    def __getattr__(self, name: str) -> Any:
        replacements = self.__dict__["_parts"]
        return replacements[name] if name in replacements else getattr(self.__dict__["_module"], name)


def mixer_forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Run transformers' forward of a recurrence with its input projections and its gated norm fused."""
    if given_cache(kwargs):
        return type(self).forward(self, hidden_states, **kwargs)
    forward = recurrent.document_forward(type(self), recurrent.documents_from(kwargs, *hidden_states.shape[:2]))
    view, recipes = TokenMixer.of(self, _family(self)), recipe_products(self)
    *inputs, output = view.linears
    projected_inputs: dict[str, Tensor] = {}

    def projected(name: str, x: Tensor) -> Tensor:
        if not projected_inputs:  # transformers' forward may zero padding first, so x is known only here
            projected_inputs.update(zip(inputs, project(x, *view.inputs, recipe=recipes[0]), strict=True))
        return projected_inputs.pop(name)

    def gated_norm(x: Tensor, gate: Tensor) -> Tensor:
        return glu(gate, rms_norm(x, view.norm.weight, epsilon(view.norm)), "silu")

    replacements: dict[str, Any] = {name: partial(projected, name) for name in inputs}
    replacements[output] = lambda x: project(x, view.output, recipe=recipes[1])[0]
    if not hooked(view.norm):
        replacements[view.norm_name] = gated_norm
    return forward(_ModuleView(self, replacements), hidden_states, **recurrent.drop_packed_keywords(kwargs))


def mlp_forward(self: Any, hidden_states: Tensor, output: bool = True, scales: list[Scale] | None = None) -> Tensor:
    """Run the MLP; a gated MLP with plain adapters runs as one fused function.

    `output` is as in `lora_mlp`, `scales` as in `project_output`.
    """
    view, recipes = MLP.of(self, _family(self)), recipe_products(self)
    linears = *view.inputs, view.output
    read = read_projections(linears) if len(linears) == 3 else None
    if read is None:
        hidden = view.activate(project(hidden_states, *view.inputs, recipe=recipes[0]), glu)
        return _drop_output(self, project_output(hidden, view.output, recipes[1], scales))
    (gate, up, down), biases, loras, _ = zip(*read, strict=True)
    x = hidden_states.to(gemm_dtype(hidden_states, linears))
    use: OutputUse = "unchanged" if scales is None else defer(read[2], x.dtype, scales)
    out = lora_mlp(x, gate, up, down, biases, loras, view.activation, shared_dropout(read), output, recipes, use)
    return _drop_output(self, out if x is hidden_states else out.to(hidden_states.dtype))
