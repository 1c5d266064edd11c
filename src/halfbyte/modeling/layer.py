"""View of a decoder layer, and keyword arguments of transformers' forwards.

All known families share one block: two halves around the residual stream, attention and a gated MLP; the family row
(`families`) lists differences in names and computation. Views are read from transformers' modules only here. A view is
valid until a submodule is replaced, so training reads a layer in every call.

Readers: training's forwards (`blocks`), `patch`, generation (`generation.decoder`) and the plan.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.glu import Activation
from ..ops.rope import halves
from ..utils.errors import ModelError
from .architectures import non_text_modules
from .families import ACTIVATIONS, Family, config_scale, family_of
from .transformers_versions import CACHE_KEYWORDS

# Keywords that transformers passes through all layers and fused forwards do not need: outputs collected by hooks,
# counts for losses, document bounds under transformers' names, positions that are already in the rotary angles.
IGNORED_KEYWORDS = frozenset({
    "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "position_ids", "seq_idx", "is_causal",
    "cu_seq_lens_k", "max_length_k", "token_type_ids", "mm_token_type_ids", "per_layer_input", "layer_idx",
})  # fmt: skip


class Half(NamedTuple):
    """Half of a layer: stream + scale · output_norm(dropout(inner(norm(stream)))).

    Attributes:
        norm: RMSNorm or LayerNorm of the input; None: the stream is not normalised.
        inner: attention or MLP, or what replaces them.
        dropout: dropout probability before the residual addition; 0 outside of training.
        output_norm: norm of the output; None: the output is not normalised.
        scale: factor of the output, 1 in most families.
    """

    norm: Any | None
    inner: Any
    dropout: float
    output_norm: Any | None
    scale: float


@dataclass
class Block(ABC):
    """Linears of one input, and an output linear.

    Attributes:
        linears: transformers' name → linear, or PEFT's wrapper; the output linear is last.
    """

    linears: dict[str, Any]

    @property
    @abstractmethod
    def parts(self) -> tuple[int, ...]:
        """Relative sizes of the outputs within one fused input linear."""

    @property
    def inputs(self) -> list[Any]:
        return list(self.linears.values())[:-1]

    @property
    def output(self) -> Any:
        return list(self.linears.values())[-1]

    def split(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return q, k and v, or gate and up, from the outputs of `inputs`."""
        if len(outputs) > 1:
            return outputs
        unit = outputs[0].shape[-1] // sum(self.parts)
        return outputs[0].split([ratio * unit for ratio in self.parts], dim=-1)


@dataclass
class Attention(Block):
    """Causal attention with rotary positions.

    Attributes:
        config: the text model's config.
        family: the family row; it defines norms and RoPE of q and k.
        norms: RMSNorms of q and of k, before RoPE.
        rotates: whether the layer has RoPE.
        query_scale: β and the context length up to which queries are unscaled, see `Family.scaled_queries`; or None.
        scaling: factor of the scores.
        softcap: scores become softcap · tanh(score / softcap).
        sinks: attention sinks [H], or None.
        window: number of tokens visible to a token, itself included; None: all.
        rope: layer type that selects the model's rotation, if layers differ.
        dropout: dropout of the attention weights in training.
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
        """Read a transformers attention module."""
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
            scaling=module.scaling * config_scale(family.query_multiplier, config),
            softcap=module.attn_logit_softcapping if family.softcap else None,
            sinks=module.sinks if family.sinks else None,
            window=window,
            rope=config.layer_types[module.layer_idx] if family.rope_by_layer else None,
            dropout=module.attention_dropout,
        )

    @property
    def obstacle(self) -> str | None:
        """Return why the fused forwards do not support this attention, or None."""
        return "q, k and v are clipped" if getattr(self.config, "clip_qkv", None) is not None else None

    def split_heads(
        self, outputs: Sequence[Tensor], apply_norm: Callable[[Any, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k and v [B, H, T, D], before head norms, and a gate [B, T, Hq·D] or None, from `inputs`' outputs.

        Args:
            outputs: [B, T, N] each.
            apply_norm: computes a norm over all heads.
        """
        gate = None
        if self.family.gated_attention == "gate_proj":
            *outputs, gate = outputs
        query, key, value = self.split(outputs)
        if self.family.gated_attention == "q_proj":
            query, gate = (x.flatten(-2) for x in query.unflatten(-1, (-1, 2, self.head_dim)).unbind(-2))
        if self.norms is not None and self.family.qk_norm == "all":
            query, key = (apply_norm(norm, x) for norm, x in zip(self.norms, (query, key), strict=True))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (query, key, value))
        return query, key, value, gate

    @property
    def head_norms(self) -> tuple[Any, Any] | None:
        """Per-head RMSNorms of q and of k."""
        return None if self.family.qk_norm == "all" else self.norms

    @property
    def rotates_outputs(self) -> bool:
        """Whether RoPE, if the layer has it, overwrites the outputs of two linears, not copies or parts of them."""
        family = self.family
        separate = len(self.inputs) > 2 and family.gated_attention != "q_proj" and not family.shares_keys
        in_order = family.rope_pairs in ("halves", "once") and self.query_scale is None
        return separate and in_order and self.norms is None

    def half_rotation(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Reorder q, k, cos and sin for a rotation of values i and i + R/2; scores are unchanged."""
        if self.family.rope_pairs == "halves":
            return query, key, cos, sin
        if self.family.rope_pairs == "once":
            return query, key, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        if self.family.rope_pairs == "repeated":
            cos, sin = halves(cos, cos.shape[-1]), halves(sin, sin.shape[-1])
        query, key = (halves(x.transpose(1, 2), cos.shape[-1]).transpose(1, 2) for x in (query, key))
        return query, key, cos, sin

    def scale_queries(self, query: Tensor, positions: Tensor) -> Tensor:
        """Scale q [B, H, T, D] of tokens at positions [B or 1, T] by `query_scale`."""
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
    """Return the norms of q and k; a layer may have none although its family has."""
    names = ("qk_norm", "qk_norm") if family.qk_norm == "shared" else ("q_norm", "k_norm")
    if not family.qk_norm or not hasattr(module, names[0]):
        return None
    query = getattr(module, names[0])
    return query, getattr(module, names[1], query)  # a layer that reuses another's keys has no k_norm


def _window(module: Any, family: Family) -> int | None:
    """Return the sliding window of an attention layer; some modules hold the model's window and a flag."""
    holder = {"config": module.config, "module": module, None: None}[family.window]
    window = getattr(holder, "sliding_window", None)
    return window if family.window != "module" or getattr(module, "is_sliding", True) else None


@dataclass
class TokenMixer(Block):
    """Recurrence in place of attention, see `modeling.families.Mixer`.

    Attributes:
        norm, norm_name: per-head norm, which a gate multiplies, and its attribute name.
    """

    norm: Any
    norm_name: str

    @classmethod
    def of(cls, module: Any, family: Family) -> TokenMixer:
        """Read a transformers recurrence module."""
        assert family.mixer is not None
        names, norm = (*family.mixer.inputs, family.mixer.output), family.mixer.norm
        return cls({name: getattr(module, name) for name in names}, getattr(module, norm), norm)

    @property
    def parts(self) -> tuple[int, ...]:
        return (1,)

    @property
    def obstacle(self) -> str | None:
        """Return None: the fused forward supports all known recurrences."""
        return None


@dataclass
class MLP(Block):
    """Gated MLP down(activation(gate(x)) · up(x)), or plain MLP down(activation(up(x))).

    Attributes:
        activation_name: transformers' name of the activation.
        act: the activation module.
        gated: whether the MLP is gated.
        sparse: whether all but the largest gate values are zeroed (Gemma 3n's activation_sparsity_pattern).
    """

    activation_name: str
    act: Any
    gated: bool
    sparse: bool = False

    @classmethod
    def of(cls, module: Any, family: Family) -> MLP:
        """Read a transformers MLP module."""
        names = ("gate_up_proj",) if "gate_up_proj" in family.fused else ("gate_proj", "up_proj")
        linears = {name: getattr(module, name) for name in (*names[not family.gated_mlp :], "down_proj")}
        act = getattr(module, "act_fn", None)
        sparse = getattr(module, "activation_sparsity", 0.0) > 0
        return cls(linears, getattr(module.config, family.activation), act, family.gated_mlp, sparse)

    @property
    def parts(self) -> tuple[int, ...]:
        return 1, 1

    def activate(self, outputs: Sequence[Tensor], glu: Callable[[Tensor, Tensor, Activation], Tensor]) -> Tensor:
        """Return the input of the down projection from the outputs of `inputs`; `glu` computes the gated unit."""
        if not self.gated:
            return self.act(outputs[0])
        gate, up = self.split(outputs)
        return glu(gate, up, self.activation)

    @property
    def activation(self) -> Activation:
        """Activation of a gated MLP without an `obstacle`."""
        return ACTIVATIONS[self.activation_name]

    @property
    def obstacle(self) -> str | None:
        """Return why no fused function supports this MLP, or None."""
        if self.sparse:
            return "its gate is sparse"
        fused = self.activation_name in ACTIVATIONS or not self.gated
        return None if fused else f"there is no fused {self.activation_name}"


def token_mixer(layer: Any, family: Family) -> Any:
    """Return the token mixer of a layer: its recurrence or its attention."""
    if family.mixer is not None and hasattr(layer, family.mixer.name):
        return getattr(layer, family.mixer.name)
    return layer.self_attn


def attention_half(layer: Any, family: Family) -> Half:
    """Return the half of a layer around its token mixer."""
    norms = _norm(layer, family.norms.before_attention), _norm(layer, family.norms.after_attention)
    inner, dropout = token_mixer(layer, family), _dropout(layer, family, "resid_attn_dropout")
    return Half(norms[0], inner, dropout, norms[1], _scale(layer, family))


def mlp_half(layer: Any, family: Family) -> Half:
    """Return the half of a layer around its MLP or mixture."""
    norms = _norm(layer, family.norms.before_mlp), _norm(layer, family.norms.after_mlp)
    inner = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    return Half(norms[0], inner, _dropout(layer, family, "resid_mlp_dropout"), norms[1], _scale(layer, family))


def _scale(layer: Any, family: Family) -> float:
    return config_scale(family.residual_scale, layer.self_attn.config) if family.residual_scale else 1.0


def _norm(layer: Any, name: str) -> Any | None:
    return getattr(layer, name) if name else None


def _dropout(layer: Any, family: Family, name: str) -> float:
    return getattr(layer, name).p if family.residual_dropout == "layer" and layer.training else 0.0


@dataclass(frozen=True)
class LayerView:
    """View of a decoder layer in a model's text part.

    Attributes:
        attention: None if a recurrence mixes the tokens.
        mlp: None for a mixture of experts, which runs transformers' own forward.
    """

    family: Family
    attention: Attention | None
    mlp: MLP | None
    attention_half: Half
    mlp_half: Half


def layer_view(layer: nn.Module) -> LayerView | str:
    """Return the view of a decoder layer, or the reason why there is none."""
    family, role = family_of(type(layer)) or (None, "")
    if family is None or role != "DecoderLayer":
        return f"halfbyte does not know the family of {type(layer).__name__}"
    if family.own_layer:
        return f"{type(layer).__name__} has its own forward"
    halves = attention_half(layer, family), mlp_half(layer, family)
    dense = family_of(type(halves[1].inner)) == (family, "MLP")
    mlp = MLP.of(halves[1].inner, family) if dense else None
    attends = family_of(type(halves[0].inner)) == (family, "Attention")
    attention = Attention.of(halves[0].inner, family) if attends else None
    return LayerView(family, attention, mlp, *halves)


def epsilon(norm: Any) -> float:
    """Return a norm's epsilon, which Llama's and Gemma's classes name differently."""
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


def causal_lm_of(model: nn.Module) -> Any:
    """Return the Hugging Face model inside a `peft.PeftModel`, or `model` itself."""
    get_base_model: Any = getattr(model, "get_base_model", None)  # a PeftModel's
    return model if get_base_model is None else get_base_model()


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return name and list of the decoder layers of a model's text part, of any family.

    Args:
        model: a transformers model, or a `peft.PeftModel` around one; the name is relative to the transformers model.

    Raises:
        ModelError: the model has no such list.
    """
    causal_lm = causal_lm_of(model)
    depth, towers = causal_lm.config.get_text_config().num_hidden_layers, tuple(non_text_modules(causal_lm))
    for name, module in causal_lm.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and not name.startswith(towers):
            return name, module
    raise ModelError(f"{type(causal_lm).__name__} has no list of {depth} decoder layers", "check config.json")


def check_keywords(module: Any, keywords: Mapping[str, Any], read_keywords: frozenset[str] = frozenset()) -> None:
    """Raise on a keyword that transformers' forward reads and a fused forward does not know.

    Ignoring it could compute something else silently. Keywords that transformers' forward only passes on, to functions
    that do not name them, change nothing there either (`ignore_index` is for the loss).

    Args:
        module: the module whose forward was called.
        keywords: the remaining arguments; None counts as not given.
        read_keywords: further keywords that the forward reads.

    Raises:
        ModelError: names the keyword, the class and the version of transformers.
    """
    module_class: Any = type(module)
    for name, value in keywords.items():
        unknown = value is not None and name not in IGNORED_KEYWORDS and name not in read_keywords
        if unknown and name not in CACHE_KEYWORDS and _reads(module_class, name):
            raise ModelError(
                f"transformers {transformers.__version__} passes {type(module).__name__} the argument {name!r}, which"
                " halfbyte's fused forward does not know",
                "set use_kernels: false (without patch: transformers' own forwards), or install a version of"
                " transformers that halfbyte supports",
            )


@functools.cache
def _reads(module_class: Any, name: str) -> bool:
    """Return whether the forward of a class, or one of the attention functions that it may call, names an argument.

    A forward without `**kwargs` counts as reading all: it would not accept an argument that it does not name.
    """
    forward = inspect.unwrap(module_class.forward)
    eager = forward.__globals__.get("eager_attention_forward")
    attention = [*ALL_ATTENTION_FUNCTIONS.values(), *([eager] if eager is not None else [])]
    functions = [forward, *(function for function in attention if not function.__module__.startswith(__package__))]
    parameters = inspect.signature(forward).parameters.values()
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return not passes_on or any(_names(inspect.unwrap(function), name) for function in functions)


def _names(function: Any, name: str) -> bool:
    """Return whether a function has a parameter `name`, or reads `kwargs` by it."""
    code = getattr(function, "__code__", None)
    return code is not None and (name in inspect.signature(function).parameters or name in code.co_consts)
