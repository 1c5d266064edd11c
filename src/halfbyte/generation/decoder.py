"""A causal LM as generation runs it: layers read once by `modeling.layer`, adapters beside the weights, no autograd.

Where keys and values are kept is the caller's: `engine.StaticEngine` has a static cache, `paged.PagedDecoder` pages.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.attention import scored, takes_scores
from ..layers.plain import hooked, watched
from ..modeling.adapters import compute_dtype_of
from ..modeling.families import SILU, config_scale
from ..modeling.head import head_from_config
from ..modeling.layer import Attention, Block, Half, LayerView, TokenMixer, epsilon, layer_view
from ..modeling.patch_record import is_bound
from ..ops.attention import Scores, Spans
from ..ops.decode_attention import softmax
from ..ops.decode_layers import DecoderLayer
from ..ops.norms import rms_norm
from ..ops.rope import qk_norm_rope, rope_
from ..parallel.shard.model import sharded
from ..parallel.tensor.layers import is_divided
from .channels import Channels, Mixture
from .delta_net import DeltaNet, is_delta_net
from .linears import Linears, Unknown, adapter_names


def context_length(model: Any) -> int | None:
    """Positions that the model has; None where its config names no bound."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions is not None and positions > 0 else None


Given = tuple[Sequence[str | None], torch.dtype, bool]  # adapters, dtype and unpacked of `Linears`


class Layer(ABC):
    """A decoder layer as generation runs it: its linears and numbers read once.

    Raises:
        Unknown: no forward of ours computes it.
    """

    inputs: Linears | DeltaNet  # of what mixes tokens

    def __init__(self, view: LayerView, mixer: Block, given: Given):
        if obstacle := None if view.mlp is None else view.mlp.obstacle:
            raise Unknown(obstacle)
        self.family, self.halves = view.family, (view.attention_half, view.mlp_half)
        self.out = Linears([mixer.output], *given)
        self.mixer: Channels | Mixture
        if view.mlp is None:
            self.mixer = Mixture(self.halves[1].inner, view.family, *given)
        else:
            self.mixer = Channels(view.mlp, *given)

    def renew(self) -> bool:
        """As `Linears.renew`."""
        return self.inputs.renew() and self.out.renew() and self.mixer.renew()


class Recurring(Layer):
    """One with a Gated DeltaNet."""

    def __init__(self, view: LayerView, given: Given):
        module = view.attention_half.inner
        if not is_delta_net(module):
            raise Unknown(f"{type(module).__name__} has a forward of its own")
        mixer = TokenMixer.of(module, view.family)
        super().__init__(view, mixer, given)
        self.inputs: DeltaNet = DeltaNet(mixer, module, *given)


class Attending(Layer):
    """One with attention."""

    def __init__(self, view: LayerView, attention: Attention, given: Given):
        if attention.obstacle:
            raise Unknown(attention.obstacle)
        super().__init__(view, attention, given)
        self.attention = attention
        self.inputs: Linears = Linears(attention.inputs, *given)

    @property
    def sinks(self) -> Tensor | None:
        return None if self.attention.sinks is None else self.attention.sinks.detach()

    @property
    def scored(self) -> bool:
        """Whether scores are capped, or have sinks: plain functions for attention are not for these."""
        return self.attention.softcap is not None or self.attention.sinks is not None

    @property
    def scores(self) -> Scores:
        return Scores(self.attention.scaling, self.attention.window, self.attention.softcap)

    def queries_keys_values(
        self, x: Tensor, positions: Tensor, normed: Callable[[Any, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """[B, H, T, D] each of x [B, T, K], and a gate [B, T, Hq·D] or None; `normed` computes a norm."""
        query, key, value, gate = self.attention.split_heads(self.inputs(x), normed)
        return self.attention.scale_queries(query, positions), key, value, gate

    @property
    def plain_rope(self) -> bool:
        """Whether q and k are turned in halves and nothing else, so that they are turned in place."""
        attention = self.attention
        return attention.rotates and attention.head_norms is None and self.family.rope_pairs == "halves"

    def one_launch(self, keys: Tensor, values: Tensor) -> DecoderLayer | None:
        """As `ops.decode_layers` takes it, with its cache [B, Hk, S, D]; None unless it is of Llama's kind and its
        weights are 4-bit."""
        attention, family = self.attention, self.family
        more = any(half.norm is None or half.output_norm is not None or half.scale != 1 for half in self.halves)
        more = more or attention.softcap is not None or attention.query_scale is not None or family.qk_norm == "all"
        more = more or attention.sinks is not None or family.gated_attention is not None
        other = family.norm_offset or family.layer_norm or family.parallel or family.rope_pairs != "halves"
        if more or other or not attention.rotates or family.fused or not isinstance(self.mixer, Channels):
            return None
        mixer = self.mixer
        if not mixer.mlp.gated or mixer.mlp.activation_name not in SILU:
            return None
        qkv, out, gate_up, down = (each.projections() for each in (self.inputs, self.out, mixer.gate_up, mixer.down))
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norms: Any = [half.norm for half in self.halves]
        norm, post_norm = (each.weight.detach() for each in norms)
        q_norm, k_norm = (None, None) if attention.norms is None else (each.weight.detach() for each in attention.norms)
        return DecoderLayer(qkv, out, gate_up, down, norm, post_norm, q_norm, k_norm, keys, values, attention.window)


Angles = tuple[Tensor, Tensor]  # cos and sin [B, T, R]
Attend = Callable[[int, Attending, Tensor, Tensor, Tensor, Angles], Tensor]
Recur = Callable[[int, Recurring, Tensor], Tensor]


class Decoder:
    """The forward of a family that `families` knows, but for its cache.

    Args:
        model: a causal LM, or a PeftModel around one.
        adapters: the adapter of each row; None for the base; one for all rows, however many they are.
        positions: that are asked for.
        unpacked: see `Linears`.

    Raises:
        Unknown: the model, or a part of it, must run its own forward.
    """

    def __init__(self, model: Any, adapters: Sequence[str | None], positions: int, unpacked: bool = False):
        causal = model.get_base_model() if adapter_names(model) else model
        views, backbone = _views(causal), causal.model
        self.embed, self.norm, self.family = backbone.embed_tokens, backbone.norm, views[0].family
        self.embedding_scale = config_scale(self.family.embedding_scale, backbone.config)
        self.dtype, self.device = compute_dtype_of(model), next(model.parameters()).device
        self.head = Linears([causal.get_output_embeddings()], adapters, self.dtype, unpacked)
        self.to_logits = head_from_config(backbone.config)
        self.layers = [_layer(view, (adapters, self.dtype, unpacked)) for view in views]
        self.attending = [layer for layer in self.layers if isinstance(layer, Attending)]
        ropes = {layer.attention.rope for layer in self.attending}
        self.ropes = {rope: self._rope(backbone.rotary_emb, rope, positions) for rope in ropes}

    @torch.inference_mode()
    def renew(self) -> bool:
        """Take the adapters as they are now; False if the model must be read anew.

        Raises:
            Unknown: as above.
        """
        return self.head.renew() and all(layer.renew() for layer in self.layers)

    def _rope(self, rotary: Any, kind: str | None, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [S, R] of every position."""
        places = torch.arange(positions, device=self.device).unsqueeze(0)
        if hasattr(rotary, "mrope_section"):
            places = places.expand(3, -1, -1)  # time, height and width, which are the same in text
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = rotary(x, places) if kind is None else rotary(x, places, kind)
        return cos[0], sin[0]

    def embedded(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens).to(self.dtype)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, V] of hidden states [B, 1, D]."""
        return self.to_logits(self.head(hidden)[0][:, 0])

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, recur: Recur) -> Tensor:
        """Hidden states [B, T, D] of tokens and their positions [B, T].

        Args:
            attend: turns a layer's q and k, keeps its new keys and values, and attends: its number, itself, q
                [B, Hq, T, D] and k, v [B, Hk, T, D], cos and sin → [B, Hq, T, D].
            recur: what stands in its place in layers with a state: the number, the layer, x → what `out` reads.
        """
        ropes = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self.ropes.items()}
        branch, residual = self.embedded(tokens), None
        for number, layer in enumerate(self.layers):
            first, second = layer.halves
            x, stream = self.normed(first.norm, branch, residual)
            if isinstance(layer, Attending):
                q, k, v, gate = layer.queries_keys_values(x, positions, lambda norm, y: self.normed(norm, y)[0])
                out = attend(number, layer, q, k, v, ropes[layer.attention.rope]).transpose(1, 2).flatten(2)
                out = out if gate is None else out * gate.sigmoid()
            else:
                assert isinstance(layer, Recurring)
                out = recur(number, layer, x)
            branch = self._leave(first, layer.out(out)[0])
            if self.family.parallel:
                branch, residual = branch + self._leave(second, layer.mixer(x)), stream
                continue
            x, residual = self.normed(second.norm, branch, stream)
            branch = self._leave(second, layer.mixer(x))
        return self.normed(self.norm, branch, residual)[0]

    def normed(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        if norm is None or self.family.layer_norm:
            total = x if residual is None else x + residual
            return total if norm is None else norm(total).to(self.dtype), total
        y, total, _ = rms_norm(x, residual, norm.weight, epsilon(norm), self.family.norm_offset)
        return y.to(self.dtype), total

    def _leave(self, half: Half, x: Tensor) -> Tensor:
        """What joins the residual stream."""
        x = x if half.output_norm is None else self.normed(half.output_norm, x)[0]
        return x if half.scale == 1 else x * half.scale

    def rotated(self, layer: Attending, q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """q and k, normed where the layer does that; may be those given, written over."""
        norms, attention = layer.attention.head_norms, layer.attention
        if layer.plain_rope:
            rope_(q, k, *angles, False)
            return q, k
        if norms is not None:
            if attention.rotates and self.family.rope_pairs == "halves" and angles[0].shape[-1] == attention.head_dim:
                weights = norms[0].weight, norms[1].weight
                return qk_norm_rope(q, k, *weights, *angles, epsilon(norms[0]), self.family.norm_offset)
            q, k = (self.normed(norm, x)[0] for norm, x in zip(norms, (q, k), strict=True))
        if not attention.rotates:
            return q, k
        q, k, *angles_ = attention.half_rotation(q, k, *angles)
        rope_(q, k, *angles_, False)
        return q, k


def _layer(view: LayerView, given: Given) -> Layer:
    return Recurring(view, given) if view.attention is None else Attending(view, view.attention, given)


def scored_attention(layer: Attending, q: Tensor, k: Tensor, v: Tensor, documents: Spans) -> Tensor | None:
    """[B, Hq, T, D] within documents of the B·T tokens, of a layer with capped scores or sinks, without building all
    scores; None where no kernel does."""
    if not layer.scored or not takes_scores(q.device, q.dtype, q.shape[-1]):
        return None
    query, key, value = (each.transpose(1, 2).flatten(0, 1).contiguous() for each in (q, k, v))
    out = scored(query, key, value, layer.sinks, documents, layer.scores)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


def prompt_attention(layer: Attending, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[B, Hq, T, D] of a whole prompt."""
    group, (scale, _, softcap) = q.shape[1] // k.shape[1], layer.scores
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if not layer.scored:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return softmax(scores.masked_fill_(~mask, -torch.inf), layer.sinks).to(q.dtype) @ v


def _views(causal: Any) -> list[LayerView]:
    """The decoder layers of a causal LM.

    Raises:
        Unknown: it is of no family, or computes something that this forward does not.
    """
    if sharded(causal) is not None:
        raise Unknown("each process has a slice of its layers")
    backbone = getattr(causal, "model", None)
    found = [layer_view(layer) for layer in getattr(backbone, "layers", ())]
    views = [view for view in found if isinstance(view, LayerView)]
    if backbone is None or not views or len(views) < len(found):
        raise Unknown(f"{type(causal).__name__} is of no family that halfbyte knows")
    config = backbone.config
    if getattr(config, "use_bidirectional_attention", False):
        raise Unknown("its attention looks ahead")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise Unknown(f"its RoPE ({rope['rope_type']}) changes with the length")
    if any(is_divided(view.attention_half.inner) for view in views):
        raise Unknown("its products are divided over processes")
    around = causal.lm_head, backbone.embed_tokens, backbone.norm
    if any(watched(module) if is_bound(module) else hooked(module) for module in around):
        raise Unknown("it has hooks")
    return views
