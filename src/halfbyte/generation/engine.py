"""Two ways to the next token's logits: our forward over a static cache, and transformers' own for unknown models."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapters import compute, compute_dtype_of, no_input_casts
from ..errors import ModelError
from ..families import scale_of
from ..hardware import capture_stream
from ..layers.plain import hooked
from ..models.head import configured_head
from ..models.layer import Half, LayerView, epsilon, layer_view
from ..models.sharding import sharded
from ..ops.decode_attention import decode_attention, store
from ..ops.decode_layers import DecoderLayer, Run, Stack, one_launch
from ..ops.glu import glu
from ..ops.norms import rms_norm
from ..ops.rope import qk_norm_rope, rope_
from ..parallel.tensor import is_divided
from .linears import Linears, Unknown, adapter_names

FP8 = torch.float8_e4m3fn
# On a CPU prompts are padded to multiples of this many tokens, and a row attends over as many slots. Few shapes have
# few compiled products; and a row's sums are the same whatever the rows beside it are.
CLASS = 32


def context_length(model: Any) -> int | None:
    """Positions that the model has; None where its config names no bound."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions is not None and positions > 0 else None


def prompt_slots(tokens: int, device: torch.device) -> int:
    """Slots of the cache that a prompt of so many tokens takes."""
    return -(-tokens // CLASS) * CLASS if device.type == "cpu" else tokens


class Engine(Protocol):
    """A batch under way. Prompts are padded on the left to one length."""

    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Logits [B, V] after tokens int64 [B, T], of which the first `padding` [B] do not count."""

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] after one more token a row, int64 [B]. The next call may overwrite them."""


class Layer:
    """A decoder layer as generation runs it: its linears and numbers read once, and its part of the cache.

    Attributes:
        keys, values: [B, Hk, S, D].

    Raises:
        Unknown: no forward of ours computes it.
    """

    def __init__(
        self, view: LayerView, adapters: Sequence[str | None], dtype: torch.dtype, keys: Tensor, values: Tensor
    ):
        if view.mlp is None:
            raise Unknown(f"{type(view.mlp_half.inner).__name__} has a forward of its own")
        if view.mlp.obstacle:
            raise Unknown(view.mlp.obstacle)
        self.family, self.attention, self.mlp = view.family, view.attention, view.mlp
        self.halves = view.attention_half, view.mlp_half
        self.qkv = Linears(self.attention.inputs, adapters, dtype)
        self.out = Linears([self.attention.output], adapters, dtype)
        self.gate_up = Linears(self.mlp.inputs, adapters, dtype)
        self.down = Linears([self.mlp.output], adapters, dtype)
        self.linears = self.qkv, self.out, self.gate_up, self.down
        self.keys, self.values = keys, values

    def queries_keys_values(self, x: Tensor) -> list[Tensor]:
        """[B, H, T, D] each of x [B, T, K]."""
        size = self.attention.head_dim
        return [part.unflatten(-1, (-1, size)).transpose(1, 2) for part in self.attention.split(self.qkv(x))]

    def mix(self, x: Tensor) -> Tensor:
        """The gated MLP of x [B, T, K]."""
        gate, up = self.mlp.split(self.gate_up(x))
        return self.down(glu(gate, up, self.mlp.activation))[0]

    def one_launch(self) -> DecoderLayer | None:
        """As `ops.decode_layers` takes it; None unless it is of Llama's kind and its weights are 4-bit."""
        attention, family = self.attention, self.family
        more = any(half.leave is not None or half.scale != 1 for half in self.halves) or attention.softcap is not None
        if more or family.norm_offset or family.fused or self.mlp.activation != "silu":
            return None
        qkv, out, gate_up, down = (each.projections() for each in self.linears)
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        norm, post_norm = (half.norm.weight.detach() for half in self.halves)
        q_norm, k_norm = (None, None) if attention.norms is None else (each.weight.detach() for each in attention.norms)
        caches = self.keys, self.values
        return DecoderLayer(qkv, out, gate_up, down, norm, post_norm, q_norm, k_norm, *caches, attention.window)


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
        views, backbone = _views(causal), causal.model
        self.embed, self.norm, self.family = backbone.embed_tokens, backbone.norm, views[0].family
        self.embedding_scale = scale_of(self.family.embedding_scale, backbone.config)
        self.dtype, self.device = compute_dtype_of(model), next(model.parameters()).device
        self.head = Linears([causal.get_output_embeddings()], adapters, self.dtype)
        self.to_logits = configured_head(backbone.config)
        self.layers = [self._layer(view, adapters, slots, cache_dtype or self.dtype) for view in views]
        ropes = {layer.attention.rope for layer in self.layers}
        self.ropes = {rope: self._rope(backbone.rotary_emb, rope, slots) for rope in ropes}
        batch = len(adapters)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.padding = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.slots, self.steps, self.logits = slots, 0, torch.empty(0)
        self.parts = [(slice(0, batch), 0)]  # rows that attend together, and the slot from which on
        self.graph: torch.cuda.CUDAGraph | None = None
        self.one_launch = self._one_launch(batch)

    @torch.inference_mode()
    def renew(self) -> bool:
        """Make ready for new prompts, with the adapters as they are now; False if the model must be read anew.

        Raises:
            Unknown: as above.
        """
        if not all(each.renew() for each in [self.head, *(each for layer in self.layers for each in layer.linears)]):
            return False
        if self.device.type == "cpu":  # its kernel may have copies
            self.one_launch = self._one_launch(len(self.tokens))
        return True

    def _one_launch(self, batch: int) -> Run | None:
        """A token's way through all layers as one kernel, where there is one and all layers are of Llama's kind."""
        layers = [found for layer in self.layers if (found := layer.one_launch()) is not None]
        epsilons = {epsilon(half.norm) for layer in self.layers for half in layer.halves}
        epsilons |= {epsilon(norm) for layer in self.layers for norm in layer.attention.norms or ()}
        if len(layers) < len(self.layers) or len(epsilons) > 1 or len(self.ropes) > 1:
            return None
        first = self.layers[0]
        shared = epsilons.pop(), first.attention.scaling, *self.ropes[first.attention.rope], self.padding, self.slot
        hidden = torch.empty(batch, self.embed.weight.shape[1], dtype=self.dtype, device=self.device)
        return one_launch(hidden, Stack(layers, first.attention.heads, *shared))

    def _layer(self, view: LayerView, adapters: Sequence[str | None], slots: int, cache_dtype: torch.dtype) -> Layer:
        shape = len(adapters), view.attention.key_heads, slots, view.attention.head_dim
        keys, values = (torch.zeros(shape, dtype=cache_dtype, device=self.device) for _ in range(2))
        return Layer(view, adapters, self.dtype, keys, values)

    def _rope(self, rotary: Any, kind: str | None, slots: int) -> tuple[Tensor, Tensor]:
        """cos and sin [S, R] of every position."""
        positions = torch.arange(slots, device=self.device).unsqueeze(0)
        x = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = rotary(x, positions) if kind is None else rotary(x, positions, kind)
        return cos[0], sin[0]

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        length = prompt_slots(tokens.shape[1], self.device)
        beside = length - tokens.shape[1]
        tokens, padding = F.pad(tokens, (beside, 0)), padding + beside
        if self.device.type == "cpu":
            self.parts = _alike([each // CLASS * CLASS for each in padding.tolist()])
        slots = torch.arange(length, device=self.device)
        self.padding.copy_(padding)
        self.slot.fill_(length - 1)
        positions = (slots - padding.unsqueeze(1)).clamp_(min=0)
        masks: dict[int | None, Tensor] = {}
        for window in {layer.attention.window for layer in self.layers}:
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
            with torch.cuda.graph(self.graph, stream=capture_stream(self.device.index)):
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

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded = self.embed(tokens).to(self.dtype)
        return embedded if self.embedding_scale == 1 else embedded * self.embedding_scale

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.to_logits(self.head(hidden)[0][:, 0])

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, masks: dict | None) -> Tensor:
        """Hidden states [B, T, D] of tokens [B, T]; their keys and values go to `slots` [T] of the cache.

        Args:
            masks: window → bool [B, 1, T, T] for a prompt; None for one token a row, which sees the cache.
        """
        ropes = {kind: (cos[positions], sin[positions]) for kind, (cos, sin) in self.ropes.items()}
        branch, residual = self._embedded(tokens), None
        for layer in self.layers:
            first, second = layer.halves
            x, residual = self._norm(first.norm, branch, residual)
            branch = self._leave(first, self._attention(layer, x, *ropes[layer.attention.rope], slots, masks))
            x, residual = self._norm(second.norm, branch, residual)
            branch = self._leave(second, layer.mix(x))
        return self._norm(self.norm, branch, residual)[0]

    def _norm(self, norm: Any, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        y, total, _ = rms_norm(x, residual, norm.weight, epsilon(norm), self.family.norm_offset)
        return y.to(self.dtype), total

    def _leave(self, half: Half, x: Tensor) -> Tensor:
        """What joins the residual stream."""
        x = x if half.leave is None else self._norm(half.leave, x)[0]
        return x if half.scale == 1 else x * half.scale

    def _attention(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, masks: Any) -> Tensor:
        q, k, v = layer.queries_keys_values(x)
        if layer.attention.norms is None:
            rope_(q, k, cos, sin, False)
        else:
            q_norm, k_norm = layer.attention.norms
            offset = self.family.norm_offset
            q, k = qk_norm_rope(q, k, q_norm.weight, k_norm.weight, cos, sin, epsilon(q_norm), offset)
        store(layer.keys, slots, k)
        store(layer.values, slots, v)
        attend = self._over_cache if masks is None else self._over_prompt
        mask: Any = None if masks is None else masks[layer.attention.window]
        end = prompt_slots(int(slots) + 1, self.device) if masks is None and self.device.type == "cpu" else None
        outs = [attend(layer, q[rows], k, v, slots, mask, rows, slice(begin, end)) for rows, begin in self.parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return layer.out(out.transpose(1, 2).flatten(2))[0]

    def _over_cache(
        self, layer: Layer, q: Tensor, _: Tensor, __: Tensor, last: Tensor, mask: None, rows: slice, own: slice
    ) -> Tensor:
        """Some rows of one token, over their own slots of the cache."""
        first = self.padding[rows]
        if own.start:
            first, last = first - own.start, last - own.start
        scaling, window, softcap = layer.attention.scaling, layer.attention.window, layer.attention.softcap
        cache = layer.keys[rows, :, own], layer.values[rows, :, own]
        return decode_attention(q, *cache, first, last, scaling, window, softcap)

    def _over_prompt(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, _: Tensor, mask: Tensor, rows: slice, own: slice
    ) -> Tensor:
        """Some rows of a prompt, without the padding before their own slots."""
        mask, k, v = mask[rows, :, own, own], k[rows, :, own], v[rows, :, own]
        out = _prompt_attention(q[:, :, own], k, v, mask, layer.attention.scaling, layer.attention.softcap)
        return F.pad(out, (0, 0, own.start, 0)) if own.start else out


def _alike(values: Sequence[int]) -> list[tuple[slice, int]]:
    """Runs of equal values: where each is, and its value."""
    changes = [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    return [(slice(begin, end), values[begin]) for begin, end in pairwise([0, *changes, len(values)])]


def _prompt_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[B, Hq, T, D] of a whole prompt."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scores = softcap * torch.tanh((q @ k.transpose(2, 3)).float() * scale / softcap)
    return scores.masked_fill_(~mask, -torch.inf).softmax(-1).to(q.dtype) @ v


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
    if any(hooked(module) for module in (causal.lm_head, backbone.embed_tokens, backbone.norm)):
        raise Unknown("it has hooks")
    return views


class StockEngine:
    """transformers' own forward and cache, or without a cache where its output has none (Mamba); one adapter, or none,
    for all rows."""

    def __init__(self, model: Any, adapters: Sequence[str | None]):
        if len(set(adapters)) > 1:
            raise ModelError(
                f"{type(model).__name__}: several adapters in one batch need a family that halfbyte knows",
                "generate for each adapter in a call of its own",
            )
        self.model, self.adapter, self.sharded = model, adapters[0], sharded(model)
        self.cache: Any = None
        self.tokens = self.mask = torch.empty(0)

    def prefill(self, tokens: Tensor, padding: Tensor) -> Tensor:
        self.mask = (torch.arange(tokens.shape[1], device=tokens.device) >= padding.unsqueeze(1)).long()
        self.tokens = tokens
        return self._forward(tokens)

    def step(self, tokens: Tensor) -> Tensor:
        self.mask = F.pad(self.mask, (0, 1), value=1)
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1)
        return self._forward(self.tokens if self.cache is None else self.tokens[:, -1:])

    @torch.no_grad()  # in inference mode, torch hands quantized weights calls that it takes apart elsewhere (DoRA's)
    def _forward(self, tokens: Tensor) -> Tensor:
        model, keys = self.model, {"attention_mask": self.mask, "past_key_values": self.cache, "use_cache": True}
        last = (context_length(model) or self.mask.shape[1]) - 1  # rows that have ended may run beyond it
        positions = (self.mask.cumsum(-1) - 1).clamp_(0, last)[:, -tokens.shape[1] :]
        with self._adapter(), no_input_casts(model), compute(model):
            result = model(input_ids=tokens, position_ids=positions, logits_to_keep=1, **keys)
        self.cache = getattr(result, "past_key_values", None)
        logits = result.logits[:, -1].float()
        return logits if self.sharded is None else self.sharded.agreed(logits.contiguous())

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
