"""Two ways to the next token's logits: our forward over a static cache, and transformers' own for unknown models."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import compute, compute_dtype_of, no_input_casts
from ..errors import ModelError
from ..families import ACTIVATIONS, Family, family_of, scale_of
from ..layers.plain import hooked
from ..models.head import configured_head
from ..models.layer import epsilon
from ..ops.decode_attention import decode_attention, store
from ..ops.decode_layers import DecoderLayer, Run, Stack, one_launch
from ..ops.glu import glu
from ..ops.norms import rms_norm
from ..ops.rope import qk_norm_rope, rope_
from .linears import Linears, Unknown, adapter_names

FP8 = torch.float8_e4m3fn


class Engine(Protocol):
    """A batch under way. Prompts are padded on the left to one length."""

    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Logits [B, V] after tokens int64 [B, T], of which the first `padding` [B] do not count."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token a row, int64 [B]. The next call may overwrite them."""


@dataclass
class Layer:
    """What one decoder layer is made of."""

    module: Any
    qkv: Linears
    out: Linears
    gate_up: Linears
    down: Linears
    window: int | None
    rope: str | None  # the layer's type, where it has RoPE of its own
    keys: Tensor  # [B, Hk, S, D]
    values: Tensor


class StaticEngine:
    """The forward of a family that `families` knows, over a cache of a size given once.

    On a CUDA device a step is captured in a CUDA graph at its second call and replayed from then on.

    Args:
        model: a causal LM, or a PeftModel around one.
        adapters: the adapter of each row; None for the base.
        slots: tokens that the cache has room for.
        cache_dtype: None for the model's dtype, or float8_e4m3fn (values beyond ±448 are clamped).

    Raises:
        Unknown: the model, or a part of it, must run its own forward.
    """

    def __init__(self, model: Any, adapters: Sequence[str | None], slots: int, cache_dtype: torch.dtype | None):
        causal = model.get_base_model() if adapter_names(model) else model
        self.family, backbone = _family(causal)
        self.config, self.embed, self.norm = backbone.config, backbone.embed_tokens, backbone.norm
        self.dtype, self.device = compute_dtype_of(model), next(model.parameters()).device
        self.activation = ACTIVATIONS[getattr(self.config, self.family.activation)]
        self.embedding_scale = scale_of(self.family.embedding_scale, self.config)
        self.residual_scale = scale_of(self.family.residual_scale, self.config)
        self.head = Linears([causal.get_output_embeddings()], adapters, self.dtype)
        self.layers = [self._layer(layer, adapters, slots, cache_dtype or self.dtype) for layer in backbone.layers]
        self.ropes = {layer.rope: self._rope(backbone.rotary_emb, layer.rope, slots) for layer in self.layers}
        batch = len(adapters)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.padding = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.slots, self.steps, self.logits = slots, 0, torch.empty(0)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.one_launch = self._one_launch(batch)

    @torch.inference_mode()
    def renew(self) -> bool:
        """Make ready for new prompts, with the adapters as they are now; False if the model must be read anew.

        Raises:
            Unknown: as above.
        """
        linears = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return all(each.renew() for each in [self.head, *linears])

    def _one_launch(self, batch: int) -> Run | None:
        """A token's way through all layers as one kernel, where there is one and the family is of Llama's kind."""
        family, attention = self.family, self.layers[0].module.self_attn
        others = family.norm_offset or family.sandwich or family.fused or family.softcap
        if others or self.residual_scale != 1.0 or self.activation != "silu":
            return None
        layers = [found for layer in self.layers if (found := _decoder_layer(layer, family)) is not None]
        epsilons = {epsilon(norm) for layer in self.layers for norm in _norms(layer.module, family)}
        if len(layers) < len(self.layers) or len(epsilons) > 1 or len(self.ropes) > 1:
            return None
        shared = epsilons.pop(), attention.scaling, *self.ropes[self.layers[0].rope], self.padding, self.slot
        hidden = torch.empty(batch, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return one_launch(hidden, Stack(layers, self.config.num_attention_heads, *shared))

    def _layer(self, layer: Any, adapters: Sequence[str | None], slots: int, cache_dtype: torch.dtype) -> Layer:
        attention, mlp, fused = layer.self_attn, layer.mlp, self.family.fused
        qkv = [attention.qkv_proj] if fused else [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [mlp.gate_up_proj] if fused else [mlp.gate_proj, mlp.up_proj]
        shape = len(adapters), self.config.num_key_value_heads, slots, attention.head_dim
        window = None
        if self.family.window:
            holder = self.config if self.family.window == "config" else attention
            window = getattr(holder, "sliding_window", None)
        return Layer(
            layer,
            Linears(qkv, adapters, self.dtype),
            Linears([attention.o_proj], adapters, self.dtype),
            Linears(gate_up, adapters, self.dtype),
            Linears([mlp.down_proj], adapters, self.dtype),
            window,
            attention.layer_type if self.family.rope_by_layer else None,
            torch.zeros(shape, dtype=cache_dtype, device=self.device),
            torch.zeros(shape, dtype=cache_dtype, device=self.device),
        )

    def _rope(self, rotary: Any, kind: str | None, slots: int) -> tuple[Tensor, Tensor]:
        """cos and sin [S, R] of every position."""
        positions = torch.arange(slots, device=self.device).unsqueeze(0)
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = rotary(x, positions) if kind is None else rotary(x, positions, kind)
        return cos[0], sin[0]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        length = tokens.shape[1]
        slots = torch.arange(length, device=self.device)
        self.padding.copy_(padding)
        self.slot.fill_(length - 1)
        positions = (slots - padding.unsqueeze(1)).clamp_(min=0)
        masks: dict[int | None, Tensor] = {}
        for window in {layer.window for layer in self.layers}:
            seen = (slots <= slots.unsqueeze(1)) & (slots >= padding.view(-1, 1, 1))
            if window is not None:
                seen &= slots > slots.unsqueeze(1) - window
            masks[window] = (seen | (slots == slots.unsqueeze(1))).unsqueeze(1)  # padding sees itself: no NaN
        hidden = self._forward(tokens, positions, slots, masks)
        return self._logits(hidden[:, -1:])

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.steps += 1
        if self.device.type == "cuda" and self.steps == 2:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self._step()
        if self.graph is not None:
            self.graph.replay()
            return self.logits
        return self._step()

    def _step(self) -> Tensor:
        self.slot.add_(1)
        if self.one_launch is not None:
            hidden = self.one_launch(self._embedded(self.tokens)).unsqueeze(1)
            return self._logits(self._norm(self.norm, hidden)[0])
        positions = (self.slot - self.padding).unsqueeze(1)
        return self._logits(self._forward(self.tokens.unsqueeze(1), positions, self.slot, None))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits, after = self.head(hidden)[0][:, 0].float(), configured_head(self.config)
        logits, cap = _times(logits, after.scale), after.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return _times(self.embed(tokens), self.embedding_scale).to(self.dtype)

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, masks: dict | None) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]; their keys and values go to `slots` [T] of the cache.

        Args:
            masks: window → bool [B, 1, T, T] for a prompt; None for one token a row, which sees the cache.
        """
        ropes = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self.ropes.items()}
        branch, residual = self._embedded(tokens), None
        for layer in self.layers:
            module = layer.module
            x, residual = self._norm(module.input_layernorm, branch, residual)
            branch = self._attention(layer, x, *ropes[layer.rope], slots, masks)
            if self.family.sandwich:
                branch = self._norm(module.post_attention_layernorm, branch)[0]
                x, residual = self._norm(module.pre_feedforward_layernorm, branch, residual)
                branch = self._norm(module.post_feedforward_layernorm, self._mlp(layer, x))[0]
            else:
                branch = _times(branch, self.residual_scale)
                x, residual = self._norm(module.post_attention_layernorm, branch, residual)
                branch = _times(self._mlp(layer, x), self.residual_scale)
        return self._norm(self.norm, branch, residual)[0]

    def _norm(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        y, total, _ = rms_norm(x, residual, norm.weight, epsilon(norm), self.family.norm_offset)
        return y.to(self.dtype), total

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x)[0].chunk(2, dim=-1) if self.family.fused else layer.gate_up(x)
        return layer.down(glu(gate, up, self.activation))[0]

    def _attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, masks: Any) -> Tensor:
        attention, size = layer.module.self_attn, layer.module.self_attn.head_dim
        parts = layer.qkv(x)
        if self.family.fused:
            queries, keys = self.config.num_attention_heads * size, self.config.num_key_value_heads * size
            parts = parts[0].split((queries, keys, keys), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        if self.family.qk_norm:
            weights = attention.q_norm.weight, attention.k_norm.weight
            q, k = qk_norm_rope(q, k, *weights, cos, sin, epsilon(attention.q_norm), self.family.norm_offset)
        else:
            rope_(q, k, cos, sin, False)
        store(layer.keys, slots, k)
        store(layer.values, slots, v)
        cap = attention.attn_logit_softcapping if self.family.softcap else None
        if masks is None:
            out = decode_attention(
                q, layer.keys, layer.values, self.padding, slots, attention.scaling, layer.window, cap
            )
        else:
            out = _prompt_attention(q, k, v, masks[layer.window], attention.scaling, cap)
        return layer.out(out.transpose(1, 2).flatten(2))[0]


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _norms(layer: Any, family: Family) -> list[Any]:
    """The norms of a layer of Llama's kind: before attention, before the gated unit, of q and of k."""
    own = [layer.self_attn.q_norm, layer.self_attn.k_norm] if family.qk_norm else []
    return [layer.input_layernorm, layer.post_attention_layernorm, *own]


def _decoder_layer(layer: Layer, family: Family) -> DecoderLayer | None:
    """A layer as `ops.decode_layers` takes it; None unless its weights are 4-bit."""
    found = [linears.projections() for linears in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    norms = [norm.weight.detach() for norm in _norms(layer.module, family)]
    q_norm, k_norm = norms[2:] or (None, None)
    qkv, out, gate_up, down = found
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    caches = layer.keys, layer.values
    return DecoderLayer(qkv, out, gate_up, down, norms[0], norms[1], q_norm, k_norm, *caches, layer.window)


def _prompt_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[B, Hq, T, D] of a whole prompt."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)).float() * scale / softcap)
    return scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(q.dtype) @ v


def _family(causal: Any) -> tuple[Family, Any]:
    """The row of a causal LM and the module that holds its layers.

    Raises:
        Unknown: it is of no family, or computes something that this forward does not.
    """
    backbone = getattr(causal, "model", None)
    layers = getattr(backbone, "layers", None)
    found = family_of(type(layers[0])) if isinstance(layers, nn.ModuleList) and len(layers) else None
    if backbone is None or found is None:
        raise Unknown(f"{type(causal).__name__} is of no family that halfbyte knows")
    family, config = found[0], backbone.config
    for layer in backbone.layers:
        kind = family_of(type(layer.mlp))
        if kind is None or kind[1] != "MLP":  # a mixture of experts
            raise Unknown(f"{type(layer.mlp).__name__} has a forward of its own")
    if getattr(config, family.activation) not in ACTIVATIONS:
        raise Unknown(f"there is no fused {getattr(config, family.activation)}")
    if getattr(config, "use_bidirectional_attention", False):
        raise Unknown("its attention looks ahead")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            raise Unknown(f"its RoPE ({rope['rope_type']}) changes with the length")
    if any(hooked(module) for module in (causal.lm_head, backbone.embed_tokens, backbone.norm)):
        raise Unknown("it has hooks")
    return family, backbone


class StockEngine:
    """transformers' own forward and cache; one adapter, or none, for all rows."""

    def __init__(self, model: Any, adapters: Sequence[str | None]):
        if len(set(adapters)) > 1:
            raise ModelError(
                f"{type(model).__name__}: several adapters in one batch need a family that halfbyte knows",
                "generate for each adapter in a call of its own",
            )
        self.model, self.adapter = model, adapters[0]
        self.cache: Any = None
        self.mask = torch.empty(0)

    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        self.mask = (torch.arange(tokens.shape[1], device=tokens.device) >= padding.unsqueeze(1)).long()
        return self._forward(tokens)

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        return self._forward(tokens.unsqueeze(1))

    @torch.inference_mode()
    def _forward(self, tokens: Tensor) -> Tensor:
        model, keys = self.model, {"attention_mask": self.mask, "past_key_values": self.cache, "use_cache": True}
        positions = (self.mask.cumsum(-1) - 1).clamp_(min=0)[:, -tokens.shape[1] :]
        with self._adapter(), no_input_casts(model), compute(model):
            result = model(input_ids=tokens, position_ids=positions, logits_to_keep=1, **keys)
        self.cache = result.past_key_values
        return result.logits[:, -1].float()

    @contextlib.contextmanager
    def _adapter(self):
        """The model with the one adapter, and as it was afterwards: PEFT freezes or thaws whatever it switches."""
        if not adapter_names(self.model):
            yield
            return
        trained = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            if self.adapter is None:
                with self.model.disable_adapter():
                    yield
            else:
                before = self.model.active_adapter
                self.model.set_adapter(self.adapter, inference_mode=True)
                try:
                    yield
                finally:
                    self.model.set_adapter(before, inference_mode=True)
        finally:
            for parameter, wanted in trained:
                parameter.requires_grad_(wanted)
