"""A decoder layer as everybody here takes it: read from transformers' modules in this file, and nowhere else.

All known families share one block: two halves around the residual stream, attention and a gated MLP, where their row
(`families`) says what is named or done differently. What is read holds as long as nobody replaces a module, so training
reads a layer at every call.

Training's forwards (`blocks`), `patch`, generation (`generation.decoder`) and the plan take layers from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.glu import Activation
from ..ops.rope import halves
from ..utils.errors import ModelError
from .architectures import beside_text
from .families import ACTIVATIONS, Family, family_of, scale_of


class Half(NamedTuple):
    """Half of a layer: stream + scale · leave(drop(inner(norm(stream)))).

    Attributes:
        norm: RMSNorm or LayerNorm; None: what is inside reads the stream as it is.
        inner: attention, or what mixes the channels of a token.
        dropout: share of what joins the residual stream that is dropped, now: 0 outside training.
        leave: what joins the residual stream is normalised; None where it is not.
        scale: 1 in most families.
    """

    norm: Any | None
    inner: Any
    dropout: float
    leave: Any | None
    scale: float


@dataclass
class Block(ABC):
    """Linears that read one input, and one for the output.

    Attributes:
        linears: transformers' name → linear, or PEFT's module around it; the output's last.
    """

    linears: dict[str, Any]

    @property
    @abstractmethod
    def parts(self) -> tuple[int, ...]:
        """How the output of one linear for all inputs is divided, in proportion."""

    @property
    def inputs(self) -> list[Any]:
        return list(self.linears.values())[:-1]

    @property
    def output(self) -> Any:
        return list(self.linears.values())[-1]

    def split(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """q, k and v, or gate and up, of what `inputs` gave."""
        if len(outputs) > 1:
            return outputs
        unit = outputs[0].shape[-1] // sum(self.parts)
        return outputs[0].split([part * unit for part in self.parts], dim=-1)


@dataclass
class Attention(Block):
    """Causal attention with rotary positions.

    Attributes:
        config: of the text model.
        family: its row, which says how q and k are normalised and turned.
        norms: RMSNorms of q and of k, before RoPE.
        rotates: whether it has RoPE.
        query_scale: β and the context in which queries are as they are, see `modeling.families.Family`; None: they always are.
        scaling: of the scores.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: [H], a score of each head that every token gives beside its keys'; None: there are none.
        window: tokens that a token sees, itself among them; None for all.
        rope: which of the model's rotations, where layers differ.
        dropout: of the scores, in training.
    """

    config: Any
    family: Family
    head_dim: int
    norms: tuple[Any, Any] | None
    rotates: bool
    query_scale: tuple[float, int] | None
    scaling: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    rope: str | None
    dropout: float

    @classmethod
    def of(cls, module: Any, family: Family) -> Attention:
        """Read from transformers' module."""
        names: tuple[str, ...] = ("qkv_proj",) if "qkv_proj" in family.fused else ("q_proj", "k_proj", "v_proj")
        if family.shares_keys:
            names = tuple(name for name in names if getattr(module, name, None) is not None)
        config, window = module.config, _window(module, family)
        rope = getattr(config, "rope_parameters", None) or {}
        has = {
            None: True,
            "all": False,
            "use_rope": getattr(module, "use_rope", True),
            "layer_rope_theta": (getattr(config, "layer_rope_theta", None) or {module.layer_idx: 1})[module.layer_idx],
            "window": window is not None or getattr(config, "sliding_window", None) is None,
        }
        gate = ("gate_proj",) if family.gated_attention == "gate_proj" else ()
        return cls(
            {name: getattr(module, name) for name in (*names, *gate, "o_proj")},
            config,
            family,
            module.head_dim,
            norms=_head_norms(module, family),
            rotates=bool(has[family.unrotated]),
            query_scale=(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
            if family.scaled_queries
            else None,
            scaling=module.scaling * scale_of(family.query_multiplier, config),
            softcap=module.attn_logit_softcapping if family.softcap else None,
            sinks=module.sinks if family.sinks else None,
            window=window,
            rope=config.layer_types[module.layer_idx] if family.rope_by_layer else None,
            dropout=module.attention_dropout,
        )

    @property
    def obstacle(self) -> str | None:
        """Why no forward of ours computes this."""
        return "q, k and v are clipped" if getattr(self.config, "clip_qkv", None) is not None else None

    def heads_of(
        self, outputs: Sequence[Tensor], normed: Callable[[Any, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v [B, H, T, D] of what `inputs` gave [B, T, N], heads not normed; a gate [B, T, Hq·D], or None.

        Args:
            normed: computes a norm, where it is over all heads.
        """
        gate = None
        if self.family.gated_attention == "gate_proj":
            *outputs, gate = outputs
        query, key, value = self.split(outputs)
        if self.family.gated_attention == "q_proj":
            query, gate = (part.flatten(-2) for part in query.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        if self.norms is not None and self.family.qk_norm == "all":
            query, key = (normed(norm, x) for norm, x in zip(self.norms, (query, key), strict=True))
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (query, key, value))
        return query, key, value, gate

    @property
    def head_norms(self) -> tuple[Any, Any] | None:
        """RMSNorms of each head of q and of k."""
        return None if self.family.qk_norm == "all" else self.norms

    def in_halves(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, cos and sin, for a rotation of values i and i + R/2: scores stay, as q and k change alike."""
        if self.family.rope_pairs == "halves":
            return query, key, cos, sin
        if self.family.rope_pairs == "once":
            return query, key, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        if self.family.rope_pairs == "repeated":
            cos, sin = halves(cos, cos.shape[-1]), halves(sin, sin.shape[-1])
        query, key = (halves(x.transpose(1, 2), cos.shape[-1]).transpose(1, 2) for x in (query, key))
        return query, key, cos, sin

    def scaled(self, query: Tensor, positions: Tensor) -> Tensor:
        """q [B, H, T, D] of tokens at positions [B or 1, T], multiplied as `query_scale` says."""
        if self.query_scale is None:
            return query
        beta, context = self.query_scale
        factor = 1 + beta * torch.log(1 + torch.floor(positions / context))
        return query * factor[:, None, :, None].to(query.dtype)

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def key_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def parts(self) -> tuple[int, ...]:
        return self.heads, self.key_heads, self.key_heads


def _head_norms(module: Any, family: Family) -> tuple[Any, Any] | None:
    """Of an attention layer, which may have none though its family does."""
    names = ("qk_norm", "qk_norm") if family.qk_norm == "shared" else ("q_norm", "k_norm")
    if not family.qk_norm or not hasattr(module, names[0]):
        return None
    query = getattr(module, names[0])
    return query, getattr(module, names[1], query)  # there is none where the keys are another layer's


def _window(module: Any, family: Family) -> int | None:
    """Of an attention layer; some modules hold the model's, and whether it is theirs."""
    holder = {"config": module.config, "module": module, None: None}[family.window]
    window = getattr(holder, "sliding_window", None)
    return window if family.window != "module" or getattr(module, "is_sliding", True) else None


@dataclass
class TokenMixer(Block):
    """What a layer has in attention's place, see `modeling.families.Mixer`.

    Attributes:
        norm, norm_name: of each head, times a gate.
    """

    norm: Any
    norm_name: str

    @classmethod
    def of(cls, module: Any, family: Family) -> TokenMixer:
        """Read from transformers' module."""
        assert family.mixer is not None
        names, norm = (*family.mixer.inputs, family.mixer.output), family.mixer.norm
        return cls({name: getattr(module, name) for name in names}, getattr(module, norm), norm)

    @property
    def parts(self) -> tuple[int, ...]:
        return (1,)

    @property
    def obstacle(self) -> str | None:
        """Why no forward of ours computes this."""
        return None


@dataclass
class MLP(Block):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x))).

    Attributes:
        named: transformers' name of the activation.
        act: its module.
        gated: which of the two.
        sparse: all but the gate's largest values are cut off first (Gemma 3n's activation_sparsity_pattern).
    """

    named: str
    act: Any
    gated: bool
    sparse: bool = False

    @classmethod
    def of(cls, module: Any, family: Family) -> MLP:
        """Read from transformers' module."""
        names = ("gate_up_proj",) if "gate_up_proj" in family.fused else ("gate_proj", "up_proj")
        linears = {name: getattr(module, name) for name in (*names[not family.gated_mlp :], "down_proj")}
        act = getattr(module, "act_fn", None)
        sparse = getattr(module, "activation_sparsity", 0.0) > 0
        return cls(linears, getattr(module.config, family.activation), act, family.gated_mlp, sparse)

    @property
    def parts(self) -> tuple[int, ...]:
        return 1, 1

    def act_on(self, outputs: Sequence[Tensor], glu: Callable[[Tensor, Tensor, Activation], Tensor]) -> Tensor:
        """What down reads, of what `inputs` gave; `glu` is the gated unit."""
        if not self.gated:
            return self.act(outputs[0])
        gate, up = self.split(outputs)
        return glu(gate, up, self.activation)

    @property
    def activation(self) -> Activation:
        """Of a gated one, where there is no `obstacle`."""
        return ACTIVATIONS[self.named]

    @property
    def obstacle(self) -> str | None:
        """Why no fused function computes this."""
        if self.sparse:
            return "most of its gate is cut off"
        return None if self.named in ACTIVATIONS or not self.gated else f"there is no fused {self.named}"


def mixer(layer: Any, family: Family) -> Any:
    """What mixes the tokens of a layer."""
    if family.mixer is not None and hasattr(layer, family.mixer.name):
        return getattr(layer, family.mixer.name)
    return layer.self_attn


def attention_half(layer: Any, family: Family) -> Half:
    norms = _norm(layer, family.norms.before_attention), _norm(layer, family.norms.after_attention)
    inner, dropout = mixer(layer, family), _dropout(layer, family, "resid_attn_dropout")
    return Half(norms[0], inner, dropout, norms[1], _scale(layer, family))


def mlp_half(layer: Any, family: Family) -> Half:
    norms = _norm(layer, family.norms.before_mlp), _norm(layer, family.norms.after_mlp)
    inner = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    return Half(norms[0], inner, _dropout(layer, family, "resid_mlp_dropout"), norms[1], _scale(layer, family))


def _scale(layer: Any, family: Family) -> float:
    return scale_of(family.residual_scale, layer.self_attn.config) if family.residual_scale else 1.0


def _norm(layer: Any, name: str) -> Any | None:
    return getattr(layer, name) if name else None


def _dropout(layer: Any, family: Family, name: str) -> float:
    return getattr(layer, name).p if family.residual_dropout == "layer" and layer.training else 0.0


@dataclass(frozen=True)
class LayerView:
    """A decoder layer of a model's text part; those of vision towers are of no family.

    Attributes:
        attention: None where something else mixes the tokens, which is no part of generation's forward.
        mlp: None where experts are in its place, which run transformers' own forward.
    """

    family: Family
    attention: Attention | None
    mlp: MLP | None
    attention_half: Half
    mlp_half: Half


def layer_view(layer: nn.Module) -> LayerView | str:
    """The view of a decoder layer, or in words why there is none."""
    family, kind = family_of(type(layer)) or (None, "")
    if family is None or kind != "DecoderLayer":
        return f"{type(layer).__name__} is of no family that halfbyte knows"
    if family.own_layer:
        return f"{type(layer).__name__} has a forward of its own"
    halves = attention_half(layer, family), mlp_half(layer, family)
    dense = family_of(type(halves[1].inner)) == (family, "MLP")
    mlp = MLP.of(halves[1].inner, family) if dense else None
    attends = family_of(type(halves[0].inner)) == (family, "Attention")
    attention = Attention.of(halves[0].inner, family) if attends else None
    return LayerView(family, attention, mlp, *halves)


def epsilon(norm: Any) -> float:
    """What a norm adds to the mean square: Llama's and Gemma's classes name it differently."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def causal_lm_of(model: nn.Module) -> Any:
    """The Hugging Face model inside a `peft.PeftModel`, or `model` itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)  # a PeftModel's
    return model if get_base_model is None else get_base_model()


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Name and list of the decoder layers of a model's text part, known family or not.

    Args:
        model: a transformers model, or a `peft.PeftModel` around one; the name is the one within the former.

    Raises:
        ModelError: it has no such list.
    """
    causal_lm = causal_lm_of(model)
    depth, towers = causal_lm.config.get_text_config().num_hidden_layers, tuple(beside_text(causal_lm))
    for name, module in causal_lm.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and not name.startswith(towers):
            return name, module
    raise ModelError(f"{type(causal_lm).__name__} has no list of {depth} decoder layers", "check config.json")
