"""The inference forward of a causal LM: weights read once through `modeling.layer`, adapters applied, no autograd.

Subclasses own the cache: `engine.StaticEngine` a static key-value cache, `paged.PagedDecoder` a paged one.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..autograd.attention import score_mod_attention, supports_scores
from ..mesh.sharded_linears import is_tensor_parallel
from ..modeling.architectures import text_model
from ..modeling.compute_dtype import compute_dtype_of
from ..modeling.families import SILU, config_scale
from ..modeling.head import head_from_config
from ..modeling.layer import Attention, Block, Half, LayerView, TokenMixer, causal_lm_of, epsilon, layer_view
from ..ops.attention import Scores, Spans
from ..ops.decode import DecoderLayer, softmax
from ..ops.norms import rms_norm
from ..ops.rope import qk_norm_rope, rope_
from ..parallel.shard.model import sharded
from .adapters import Unsupported, module_of
from .delta_net import DeltaNet, is_delta_net
from .images import PlacedPrompt
from .linears import Linears
from .mlp import DenseMLP, MoEBlock
from .structure import structure_of


def context_length(model: Any) -> int | None:
    """Return the model's number of positions, or None if its config sets no bound."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions is not None and positions > 0 else None


LinearOptions = tuple[Sequence[str | None], torch.dtype, bool]  # arguments of `Linears`: adapters, dtype, unpacked


class Layer(ABC):
    """A decoder layer for inference; reads the layer's weights and constants once.

    Raises:
        Unsupported: halfbyte has no forward for this layer.
    """

    inputs: Linears | DeltaNet  # input projections of the token mixer

    def __init__(self, view: LayerView, mixer: Block, options: LinearOptions):
        if obstacle := None if view.mlp is None else view.mlp.obstacle:
            raise Unsupported(obstacle)
        self.family, self.halves = view.family, (view.attention_half, view.mlp_half)
        self.out = Linears([mixer.output], *options)
        self.mlp: DenseMLP | MoEBlock
        if view.mlp is None:
            self.mlp = MoEBlock(self.halves[1].inner, view.family, *options)
        else:
            self.mlp = DenseMLP(view.mlp, *options)

    def renew(self) -> bool:
        """Refresh the weights as `Linears.renew` does."""
        return self.inputs.renew() and self.out.renew() and self.mlp.renew()


class DeltaNetLayer(Layer):
    """A layer whose token mixer is a Gated DeltaNet."""

    def __init__(self, view: LayerView, options: LinearOptions):
        module = view.attention_half.inner
        if not is_delta_net(module):
            raise Unsupported(f"{type(module).__name__} has a forward of its own")
        mixer = TokenMixer.of(module, view.family)
        super().__init__(view, mixer, options)
        self.inputs: DeltaNet = DeltaNet(mixer, module, *options)


class AttentionLayer(Layer):
    """A layer whose token mixer is attention."""

    def __init__(self, view: LayerView, attention: Attention, options: LinearOptions):
        if attention.obstacle:
            raise Unsupported(attention.obstacle)
        super().__init__(view, attention, options)
        self.attention = attention
        self.inputs: Linears = Linears(attention.inputs, *options)

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Number and size of the key heads."""
        return self.attention.key_heads, self.attention.head_dim

    @property
    def sinks(self) -> Tensor | None:
        return None if self.attention.sinks is None else self.attention.sinks.detach()

    @property
    def has_custom_scores(self) -> bool:
        """Whether scores are soft-capped or have sinks, so that plain SDPA does not apply."""
        return self.attention.softcap is not None or self.attention.sinks is not None

    @property
    def scores(self) -> Scores:
        return Scores(self.attention.scaling, self.attention.window, self.attention.softcap)

    def queries_keys_values(
        self, x: Tensor, positions: Tensor, normed: Callable[[Any, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v [B, H, T, D] and a gate [B, T, Hq·D] or None, for x [B, T, K]; `normed` applies a norm."""
        query, key, value, gate = self.attention.split_heads(self.inputs(x), normed)
        return self.attention.scale_queries(query, positions), key, value, gate

    @property
    def plain_rope(self) -> bool:
        """Whether q and k need only RoPE in halves, which is applied in place."""
        attention = self.attention
        return attention.rotates and attention.head_norms is None and self.family.rope_pairs == "halves"

    def one_launch(self, keys: Tensor, values: Tensor) -> DecoderLayer | None:
        """Return the layer and its cache [B, Hk, S, D] for the persistent decode kernel of `ops.decode`.

        None unless the layer has Llama's structure and 4-bit weights.
        """
        attention, family = self.attention, self.family
        mlp = self.mlp
        if not isinstance(mlp, DenseMLP) or not mlp.view.gated or mlp.view.activation_name not in SILU:
            return None
        has_llama_halves = all(
            half.norm is not None and half.output_norm is None and half.scale == 1 for half in self.halves
        )
        has_llama_attention = (
            attention.rotates
            and attention.softcap is None
            and attention.query_scale is None
            and attention.sinks is None
            and family.gated_attention is None
            and family.qk_norm != "all"
            and family.rope_pairs == "halves"
        )
        differs = family.norm_offset or family.layer_norm or family.parallel or family.fused
        if differs or not (has_llama_halves and has_llama_attention):
            return None
        qkv, out, gate_up, down = (linears.projections() for linears in (self.inputs, self.out, mlp.gate_up, mlp.down))
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norms: Any = [half.norm for half in self.halves]
        norm, post_norm = (module.weight.detach() for module in norms)
        q_norm = k_norm = None
        if attention.norms is not None:
            q_norm, k_norm = (module.weight.detach() for module in attention.norms)
        return DecoderLayer(qkv, out, gate_up, down, norm, post_norm, q_norm, k_norm, keys, values, attention.window)


Angles = tuple[Tensor, Tensor]  # cos and sin [B, T, R]
Attend = Callable[[int, AttentionLayer, Tensor, Tensor, Tensor, Angles], Tensor]
Recur = Callable[[int, DeltaNetLayer, Tensor], Tensor]


class Decoder:
    """The forward of a family in `families`, without the cache.

    Attributes:
        bidirectional_images: the tokens of an image attend to each other in both directions.

    Args:
        model: a causal LM, or a PeftModel around one.
        adapters: the adapter of each row (None: the base), or a single entry for any number of rows.
        positions: number of positions to precompute RoPE for.
        unpacked: decode quantized weights once; see `Linears`.

    Raises:
        Unsupported: the model, or a part of it, needs transformers' own forward.
    """

    def __init__(self, model: Any, adapters: Sequence[str | None], positions: int, unpacked: bool = False):
        causal = causal_lm_of(model)
        views, backbone = _views(causal, adapters), module_of(text_model(causal), adapters)
        self.structure = structure_of(causal)
        self.embed, self.norm = module_of(backbone.embed_tokens, adapters), module_of(backbone.norm, adapters)
        self.family = views[0].family
        named = self.family.package == causal.config.model_type  # a text model inside of another family is causal
        self.bidirectional_images = self.family.bidirectional_images and named
        self.embedding_scale = config_scale(self.family.embedding_scale, backbone.config)
        self.dtype, self.device = compute_dtype_of(model), next(model.parameters()).device
        self.head = Linears([causal.get_output_embeddings()], adapters, self.dtype, unpacked)
        self.to_logits = head_from_config(backbone.config)
        options = (adapters, self.dtype, unpacked)
        self.layers: list[Layer] = [
            DeltaNetLayer(view, options) if view.attention is None else AttentionLayer(view, view.attention, options)
            for view in views
        ]
        self.attention_layers = [layer for layer in self.layers if isinstance(layer, AttentionLayer)]
        ropes = {layer.attention.rope for layer in self.attention_layers}
        self.rotary = module_of(backbone.rotary_emb, adapters)
        self.frequencies = [buffer.clone() for buffer in self.rotary.buffers()]
        counted = torch.arange(positions, device=self.device)
        self.ropes = {rope: self._rope(self.rotary, rope, counted) for rope in ropes}

    @torch.inference_mode()
    def renew(self, model: Any) -> bool:
        """Refresh the weights' and adapters' values. Returns False if the decoder must be rebuilt.

        Args:
            model: the model that this decoder was made for; decoders do not reference it, since it owns them.

        Raises:
            Unsupported: as in the constructor.
        """
        if structure_of(causal_lm_of(model)) != self.structure:
            return False
        if not all(map(torch.equal, self.frequencies, self.rotary.buffers())):
            return False
        return self.head.renew() and all(layer.renew() for layer in self.layers)

    def _rope(self, rotary: Any, layer_type: str | None, positions: Tensor) -> Angles:
        """Return cos and sin [T, R] of positions int64 [T], or [3, T] of M-RoPE."""
        position_ids = positions.unsqueeze(-2)
        if hasattr(rotary, "mrope_section"):
            position_ids = position_ids.expand(3, 1, -1)  # time, height and width; equal for text
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = rotary(x, position_ids) if layer_type is None else rotary(x, position_ids, layer_type)
        return cos[0], sin[0]

    def embedded(self, tokens: Tensor) -> Tensor:
        return self._scaled(self.embed(tokens))

    def _scaled(self, embeddings: Tensor) -> Tensor:
        embeddings = embeddings.to(self.dtype)
        return embeddings if self.embedding_scale == 1 else embeddings * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, V] of hidden states [B, 1, D]."""
        return self.to_logits(self.head(hidden)[0][:, 0])

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, recur: Recur, images: Sequence[PlacedPrompt] = ()
    ) -> Tensor:
        """Return hidden states [B, T, D] of tokens and positions [B, T].

        Args:
            images: prompts with images among the tokens.
            attend: applies RoPE, stores the new keys and values, and computes attention: (layer number, layer, q
                [B, Hq, T, D], k and v [B, Hk, T, D], cos and sin) → [B, Hq, T, D].
            recur: token mixer of layers with a recurrent state: (layer number, layer, x) → input of `out`.
        """
        ropes = {layer_type: (cos[positions], sin[positions]) for layer_type, (cos, sin) in self.ropes.items()}
        branch, residual = self.embedded(tokens), None
        for placed in images:
            branch[placed.row, placed.tokens] = self._scaled(placed.prompt.embeddings)
            if placed.prompt.positions is not None:
                for layer_type, angles in ropes.items():
                    prompt_angles = self._rope(self.rotary, layer_type, placed.prompt.positions)
                    for rows, new in zip(angles, prompt_angles, strict=True):
                        rows[placed.row, placed.tokens] = new
        for number, layer in enumerate(self.layers):
            first, second = layer.halves
            x, stream = self.normed(first.norm, branch, residual)
            if isinstance(layer, AttentionLayer):
                q, k, v, gate = layer.queries_keys_values(x, positions, lambda norm, y: self.normed(norm, y)[0])
                out = attend(number, layer, q, k, v, ropes[layer.attention.rope]).transpose(1, 2).flatten(2)
                out = out if gate is None else out * gate.sigmoid()
            else:
                assert isinstance(layer, DeltaNetLayer)
                out = recur(number, layer, x)
            branch = self._branch_output(first, layer.out(out)[0])
            if self.family.parallel:
                branch, residual = branch + self._branch_output(second, layer.mlp(x)), stream
            else:
                x, residual = self.normed(second.norm, branch, stream)
                branch = self._branch_output(second, layer.mlp(x))
            for placed in images:
                if number < len(placed.prompt.added):
                    prompt_branch = branch[placed.row, placed.tokens]
                    prompt_branch[placed.prompt.image >= 0] += placed.prompt.added[number].to(self.dtype)
        return self.normed(self.norm, branch, residual)[0]

    def normed(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual)."""
        if norm is None or self.family.layer_norm:
            total = x if residual is None else x + residual
            return total if norm is None else norm(total).to(self.dtype), total
        y, total, _ = rms_norm(x, residual, norm.weight, epsilon(norm), self.family.norm_offset)
        return y.to(self.dtype), total

    def _branch_output(self, half: Half, x: Tensor) -> Tensor:
        """Apply the branch's output norm and scale, before the residual addition."""
        x = x if half.output_norm is None else self.normed(half.output_norm, x)[0]
        return x if half.scale == 1 else x * half.scale

    def rotated(self, layer: AttentionLayer, q: Tensor, k: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Apply RoPE, and QK norms where the layer has them. May overwrite q and k."""
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


def scored_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, documents: Spans) -> Tensor | None:
    """Attention [B, Hq, T, D] within documents for layers with soft-capped scores or sinks, by a fused kernel.

    Returns None if the layer has plain scores or no kernel applies.
    """
    if not layer.has_custom_scores or not supports_scores(q.device, q.dtype, q.shape[-1]):
        return None
    query, key, value = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (q, k, v))
    out = score_mod_attention(query, key, value, layer.sinks, documents, layer.scores)
    return out.unflatten(0, (len(q), -1)).transpose(1, 2)


def prompt_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention [B, Hq, T, D] over a full prompt."""
    group, (scale, _, softcap) = q.shape[1] // k.shape[1], layer.scores
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if not layer.has_custom_scores:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = (q @ k.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return softmax(scores.masked_fill_(~mask, -torch.inf), layer.sinks).to(q.dtype) @ v


def _views(causal: Any, adapters: Sequence[str | None]) -> list[LayerView]:
    """Return the views of a causal LM's decoder layers, with the norms that the adapters use.

    Raises:
        Unsupported: the family is unknown, or the model computes something this forward does not.
    """
    if sharded(causal) is not None:
        raise Unsupported("its layers are sharded over processes")
    backbone = module_of(text_model(causal), adapters)
    layer_views = [layer_view(layer) for layer in getattr(backbone, "layers", ())]
    views = [view for view in layer_views if isinstance(view, LayerView)]
    if backbone is None or not views or len(views) < len(layer_views):
        raise Unsupported(f"halfbyte does not support the family of {type(causal).__name__}")
    if views[0].family.qk_norm == "shared":
        raise Unsupported(f"{type(causal).__name__} normalises queries and keys without weights")
    config = backbone.config
    if getattr(config, "use_bidirectional_attention", False):
        raise Unsupported("its attention is bidirectional")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise Unsupported(f"its RoPE ({rope['rope_type']}) changes with the length")
    if any(is_tensor_parallel(view.attention_half.inner) for view in views):
        raise Unsupported("its layers are split by tensor parallelism")
    indices = [getattr(view.attention_half.inner, "layer_idx", number) for number, view in enumerate(views)]
    if len(set(indices)) < len(indices):
        raise Unsupported("several of its layers have one place in the cache (layer_idx)")
    return [_of_adapters(view, adapters) for view in views]


def _of_adapters(view: LayerView, adapters: Sequence[str | None]) -> LayerView:
    """Return the view of a layer with the norms of its adapters."""

    def half_of(half: Half) -> Half:
        norm, output_norm = module_of(half.norm, adapters), module_of(half.output_norm, adapters)
        return half._replace(norm=norm, output_norm=output_norm)

    attention = view.attention
    if attention is not None and attention.norms is not None:
        query_norm, key_norm = (module_of(norm, adapters) for norm in attention.norms)
        attention = replace(attention, norms=(query_norm, key_norm))
    halves = half_of(view.attention_half), half_of(view.mlp_half)
    return replace(view, attention=attention, attention_half=halves[0], mlp_half=halves[1])
