"""A decoder layer as everybody here takes it: read from transformers' modules in this file, and nowhere else.

All known families share one block: two halves around the residual stream, attention and a gated MLP, where their row
(`families`) says what is named or done differently. What is read holds as long as nobody replaces a module, so training
reads a layer at every call.

Training's forwards (`blocks`), `patch`, generation (`generation.decoder`) and the plan take layers from here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..architectures import beside_text
from ..errors import ModelError
from ..families import ACTIVATIONS, Family, family_of, scale_of
from ..ops.glu import Activation


class Half(NamedTuple):
    """Half of a layer: stream + scale · leave(dropout(inner(norm(stream)))).

    Attributes:
        norm: RMSNorm.
        inner: attention, or what mixes the channels of a token.
        dropout, leave: what joins the residual stream is dropped out, or normalised; None where it is not.
        scale: 1 in most families.
    """

    norm: Any
    inner: Any
    dropout: Any | None
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
        norms: RMSNorms of each head of q and of k, before RoPE.
        scaling: of the scores.
        softcap: scores become softcap · tanh(score / softcap).
        window: tokens that a token sees, itself among them; None for all.
        rope: which of the model's rotations, where layers differ.
        dropout: of the scores, in training.
    """

    config: Any
    head_dim: int
    norms: tuple[Any, Any] | None
    scaling: float
    softcap: float | None
    window: int | None
    rope: str | None
    dropout: float

    @classmethod
    def of(cls, module: Any, family: Family) -> Attention:
        """Read from transformers' module."""
        names = ("qkv_proj", "o_proj") if family.fused else ("q_proj", "k_proj", "v_proj", "o_proj")
        holder = {"config": module.config, "module": module, None: None}[family.window]
        return cls(
            {name: getattr(module, name) for name in names},
            module.config,
            module.head_dim,
            norms=(module.q_norm, module.k_norm) if family.qk_norm else None,
            scaling=module.scaling,
            softcap=module.attn_logit_softcapping if family.softcap else None,
            window=getattr(holder, "sliding_window", None),
            rope=module.layer_type if family.rope_by_layer else None,
            dropout=module.attention_dropout,
        )

    @property
    def heads(self) -> int:
        return self.config.num_attention_heads

    @property
    def key_heads(self) -> int:
        return self.config.num_key_value_heads

    @property
    def parts(self) -> tuple[int, ...]:
        return self.heads, self.key_heads, self.key_heads


@dataclass
class GatedMLP(Block):
    """down(activation(gate(x)) · up(x)).

    Attributes:
        named: transformers' name of the activation.
    """

    named: str

    @classmethod
    def of(cls, module: Any, family: Family) -> GatedMLP:
        """Read from transformers' module."""
        names = ("gate_up_proj", "down_proj") if family.fused else ("gate_proj", "up_proj", "down_proj")
        return cls({name: getattr(module, name) for name in names}, getattr(module.config, family.activation))

    @property
    def parts(self) -> tuple[int, ...]:
        return 1, 1

    @property
    def activation(self) -> Activation:
        """Where there is no `obstacle`."""
        return ACTIVATIONS[self.named]

    @property
    def obstacle(self) -> str | None:
        """Why no fused function computes this."""
        return None if self.named in ACTIVATIONS else f"there is no fused {self.named}"


def attention_half(layer: Any, family: Family) -> Half:
    dropout = layer.resid_attn_dropout if family.residual_dropout else None
    leave = layer.post_attention_layernorm if family.sandwich else None
    scale = scale_of(family.residual_scale, layer.self_attn.config)
    return Half(layer.input_layernorm, layer.self_attn, dropout, leave, scale)


def mlp_half(layer: Any, family: Family) -> Half:
    dropout = layer.resid_mlp_dropout if family.residual_dropout else None
    norm, leave = layer.post_attention_layernorm, None
    if family.sandwich:
        norm, leave = layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm
    return Half(norm, layer.mlp, dropout, leave, scale_of(family.residual_scale, layer.self_attn.config))


@dataclass(frozen=True)
class LayerView:
    """A decoder layer of a model's text part; those of vision towers are of no family.

    Attributes:
        mlp: None where experts are in its place, which run transformers' own forward.
    """

    family: Family
    attention: Attention
    mlp: GatedMLP | None
    attention_half: Half
    mlp_half: Half


def layer_view(layer: nn.Module) -> LayerView | str:
    """The view of a decoder layer, or in words why there is none."""
    family, kind = family_of(type(layer)) or (None, "")
    if family is None or kind != "DecoderLayer":
        return f"{type(layer).__name__} is of no family that halfbyte knows"
    halves = attention_half(layer, family), mlp_half(layer, family)
    dense = family_of(type(halves[1].inner)) == (family, "MLP")
    mlp = GatedMLP.of(halves[1].inner, family) if dense else None
    return LayerView(family, Attention.of(halves[0].inner, family), mlp, *halves)


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
