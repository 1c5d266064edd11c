"""A decoder layer as everybody here takes it: read from transformers' modules in this file, and nowhere else.

All known families share one block: two halves around the residual stream, attention and a gated MLP. A view says where
its modules and numbers are, with the names of its family's row (`families`); it holds nothing itself and looks at the
module at every question, since adapters, hooks and whole modules come and go.

Training's forwards (`blocks`), `patch`, generation (`generation.engine`) and the plan read layers through views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..architectures import beside_text
from ..errors import ModelError
from ..families import ACTIVATIONS, Family, family_of, scale_of
from ..ops.glu import Activation

Mixer = Literal["dense", "experts"]


class Half(NamedTuple):
    """Half of a layer: stream + scale · leave(dropout(inner(norm(stream)))).

    Attributes:
        norm: RMSNorm.
        inner: attention, or what mixes the channels of a token.
        dropout: None where the family has none.
        leave: the norm of what joins the residual stream; None where the family has none.
    """

    norm: Any
    inner: Any
    dropout: Any | None
    leave: Any | None
    scale: float

    @property
    def drops(self) -> bool:
        return self.dropout is not None and self.dropout.p > 0


@dataclass(frozen=True)
class Block:
    """A module with linears: those that read its input, and one for its output.

    Args:
        module: transformers' own.
        family: its row.
    """

    module: Any
    family: Family

    @property
    def roles(self) -> tuple[str, ...]:
        """transformers' names of the linears, the output's last."""
        raise NotImplementedError

    @property
    def linears(self) -> dict[str, Any]:
        return {role: getattr(self.module, role) for role in self.roles}

    @property
    def inputs(self) -> list[Any]:
        return [getattr(self.module, role) for role in self.roles[:-1]]

    @property
    def output(self) -> Any:
        return getattr(self.module, self.roles[-1])


class Attention(Block):
    """Causal attention with rotary positions."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ("qkv_proj", "o_proj") if self.family.fused else ("q_proj", "k_proj", "v_proj", "o_proj")

    @property
    def heads(self) -> int:
        return self.module.config.num_attention_heads

    @property
    def key_heads(self) -> int:
        return self.module.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        return self.module.head_dim

    def split(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """q, k and v [..., heads · head_dim] of what `inputs` gave."""
        if not self.family.fused:
            return outputs
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        return outputs[0].split((queries, keys, keys), dim=-1)

    @property
    def norms(self) -> tuple[Any, Any] | None:
        """RMSNorms of each head of q and of k, before RoPE."""
        return (self.module.q_norm, self.module.k_norm) if self.family.qk_norm else None

    @property
    def scaling(self) -> float:
        """Of the scores."""
        return self.module.scaling

    @property
    def softcap(self) -> float | None:
        """Scores become softcap · tanh(score / softcap)."""
        return self.module.attn_logit_softcapping if self.family.softcap else None

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself among them; None for all."""
        holders = {"config": self.module.config, "module": self.module}
        return getattr(holders[self.family.window], "sliding_window", None) if self.family.window else None

    @property
    def rope(self) -> str | None:
        """Which of the model's rotations, where layers differ."""
        return self.module.layer_type if self.family.rope_by_layer else None

    @property
    def dropout(self) -> float:
        """Of the scores, in training."""
        return self.module.attention_dropout


class GatedMLP(Block):
    """down(activation(gate(x)) · up(x))."""

    @property
    def roles(self) -> tuple[str, ...]:
        return ("gate_up_proj", "down_proj") if self.family.fused else ("gate_proj", "up_proj", "down_proj")

    def split(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """gate and up [..., inner] of what `inputs` gave."""
        return outputs[0].chunk(2, dim=-1) if self.family.fused else outputs

    @property
    def activation(self) -> Activation:
        """Where there is no `obstacle`."""
        return ACTIVATIONS[self._activation]

    @property
    def obstacle(self) -> str | None:
        """Why no fused function computes this."""
        return None if self._activation in ACTIVATIONS else f"there is no fused {self._activation}"

    @property
    def _activation(self) -> str:
        return getattr(self.module.config, self.family.activation)


@dataclass(frozen=True)
class LayerView:
    """A decoder layer of a model's text part; those of vision towers are of no family. Arguments as of `Attention`."""

    module: Any
    family: Family

    @property
    def attention(self) -> Attention:
        return Attention(self.module.self_attn, self.family)

    @property
    def mixer(self) -> Mixer:
        """What mixes the channels of a token; for experts there is no view, and transformers' own forward runs."""
        found = family_of(type(self.module.mlp))
        return "dense" if found is not None and found[1] == "MLP" else "experts"

    @property
    def mlp(self) -> GatedMLP:
        """Of a dense layer."""
        return GatedMLP(self.module.mlp, self.family)

    @property
    def attention_half(self) -> Half:
        own, family = self.module, self.family
        dropout = own.resid_attn_dropout if family.residual_dropout else None
        leave = own.post_attention_layernorm if family.sandwich else None
        return Half(own.input_layernorm, own.self_attn, dropout, leave, self._scale)

    @property
    def mlp_half(self) -> Half:
        own, family = self.module, self.family
        if family.sandwich:
            return Half(own.pre_feedforward_layernorm, own.mlp, None, own.post_feedforward_layernorm, self._scale)
        dropout = own.resid_mlp_dropout if family.residual_dropout else None
        return Half(own.post_attention_layernorm, own.mlp, dropout, None, self._scale)

    @property
    def _scale(self) -> float:
        return scale_of(self.family.residual_scale, self.module.self_attn.config)


def layer_view(layer: nn.Module) -> LayerView | str:
    """The view of a decoder layer, or in words why there is none."""
    found = family_of(type(layer))
    if found is None or found[1] != "DecoderLayer":
        return f"{type(layer).__name__} is of no family that halfbyte knows"
    return LayerView(layer, found[0])


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
