"""Config values that llama.cpp's graph of a family fixes, and the check that a model has them.

Export refuses a model with another value and names the key, because llama.cpp would load the file and compute something
else. Import sets the keys to the graph's values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..modeling.config_facts import max_layer_sizes
from ..modeling.families import FAMILIES, NO_GRAPH, Family, family_of_config
from ..utils.errors import ModelError
from ..utils.notices import notice

# Config keys that the writer, the tensors' rules or `fixed_keys` take into account in every family.
READ = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "original_max_position_embeddings", "rms_norm_eps", "layer_norm_eps",
    "rope_parameters", "tie_word_embeddings", "layer_types", "no_rope_layers", "query_pre_attn_scalar",
    "linear_value_head_dim", "num_experts", "num_local_experts",
    "attention_bias", "qkv_bias", "mlp_bias", "use_bias",  # shown by tensors
    "sliding_window", "use_sliding_window", "max_window_layers",  # a graph without windows is logged
}  # fmt: skip
# Config keys that change no logits: training, token ids, outputs, and what `layer_types` or `no_rope_layers` repeat.
INERT = {
    "attention_dropout", "embd_pdrop", "resid_pdrop", "residual_dropout", "initializer_range", "router_aux_loss_coef",
    "router_jitter_noise", "output_router_logits", "use_cache", "pretraining_tp", "num_nextn_predict_layers",
    "bos_token_id", "eos_token_id", "pad_token_id", "sliding_window_pattern", "_sliding_window_pattern",
    "no_rope_layer_interval",
}  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention")
# RoPE type → the keys of `rope_parameters` that transformers reads for it and the file holds.
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {
        "factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor",
    },
    "proportional": set(),
}  # fmt: skip
EVERY_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
TEMPERED = {"llama_4_scaling_beta", "max_position_embeddings"}  # of models that scale queries by their position
ROPE_TYPES = ("default", "linear", "yarn")  # that all graphs have; `Gguf.rope_factors` has the others
YARN = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # values that the graphs fix


def head_dim(config: Any) -> int:
    """Width of an attention head."""
    return max_layer_sizes(config).head_dim


def experts_of(config: Any, family: Family) -> int:
    """Number of experts per layer; 0 for a dense model."""
    return int(getattr(config, family.experts.count)) if family.experts else 0


def fixed_keys(family: Family, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Config keys with their only supported value in the graph of a model of these sizes."""
    graph = family.gguf
    fixed = dict(graph.fixed)
    if graph.wide_layers:
        fixed["query_pre_attn_scalar"] = hidden // heads if layers == graph.wide_layers else head_dim
    if graph.window_every:
        fixed["layer_types"] = [
            "sliding_attention" if (layer + 1) % graph.window_every else "full_attention" for layer in range(layers)
        ]
    if graph.attention_every:
        fixed["layer_types"] = [
            "linear_attention" if (layer + 1) % graph.attention_every else "full_attention" for layer in range(layers)
        ]
    if not graph.grouped:
        fixed["num_key_value_heads"] = heads
    if graph.unrotated_every:
        fixed["no_rope_layers"] = [int((layer + 1) % graph.unrotated_every > 0) for layer in range(layers)]
    return fixed


def checked_family(config: Any) -> Family:
    """Return the family of a transformers (text) config after checking that llama.cpp's graph supports it.

    Each key of the config is written, compared with the graph's value, known to change no logits, or compared with
    transformers' default.

    Raises:
        ModelError: the unsupported family or config key.
    """
    family = family_of_config(config)
    if reason := NO_GRAPH.get(config.model_type):
        raise ModelError(f"GGUF export does not know {config.model_type} models: {reason}", "serve it with vLLM")
    if family is None or not family.gguf.arch:
        supported = ", ".join(sorted(row.model_type for row in FAMILIES if row.gguf.arch))
        raise ModelError(f"GGUF export does not know {config.model_type} models", f"it knows {supported}")
    graph = family.gguf
    activation = getattr(config, family.activation) if family.activation else "silu"
    if activation not in graph.activations:
        raise _unsupported(family.activation, activation, family)
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head_dim(config)
    fixed = fixed_keys(family, *sizes)
    accounted = {
        *READ,
        *INERT,
        *graph.read,
        *fixed,
        *graph.keys.values(),
        *graph.bias_keys,
        family.activation,
        graph.dense_first,
    }
    defaults = type(config)()
    unread_keys = defaults.to_dict().keys() - PreTrainedConfig().to_dict().keys() - accounted
    for key, expected in {**{key: getattr(defaults, key) for key in sorted(unread_keys)}, **fixed}.items():
        value = getattr(config, key, expected)
        if (value or None) != (expected or None):
            raise _unsupported(key, value, family)
    if graph.layered and config.use_bidirectional_attention not in (None, "vision"):  # of images: `vision` checks it
        raise _unsupported("use_bidirectional_attention", config.use_bidirectional_attention, family)
    for key, name in graph.keys.items():
        value = getattr(config, name)
        if (value is None and key not in graph.optional) or (isinstance(value, float) and value == 0):
            raise _unsupported(name, value, family)  # the graph would use its own default
    size = head_dim(config)
    if graph.attention_every and config.linear_value_head_dim != config.linear_key_head_dim:
        raise _unsupported("linear_value_head_dim", config.linear_value_head_dim, family)  # the graph has one width
    if graph.square and size * config.num_attention_heads != config.hidden_size:
        raise _unsupported("head_dim", size, family)
    if graph.window_every > 1 and config.num_hidden_layers < graph.window_every:
        raise _unsupported("num_hidden_layers", config.num_hidden_layers, family)  # no layer with full attention
    _check_rope(config, family)
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if windowed and not graph.window_every and not graph.layered:
        notice(
            "gguf-window",
            f"llama.cpp ignores this family's sliding_window: beyond {config.sliding_window} tokens its answers differ"
            " from transformers'",
        )
    return family


# --- RoPE -------------------------------------------------------------------------------------------------------------


def rope_of(config: Any) -> dict[str, Any]:
    """RoPE parameters of the layers with full attention, without keys that are null."""
    parameters = config.rope_parameters
    of_full_attention = parameters.get("full_attention", parameters)
    return {key: value for key, value in of_full_attention.items() if value is not None}


def original_context(config: Any) -> int:
    """Context length before RoPE scaling."""
    key = "original_max_position_embeddings"
    return int(rope_of(config).get(key) or getattr(config, key, None) or config.max_position_embeddings)


def scaling_factor(config: Any) -> float:
    """Factor by which RoPE scaling extends the context: `factor`, or the ratio of the context lengths."""
    return float(rope_of(config).get("factor") or config.max_position_embeddings / original_context(config))


def longrope_attention(factor: float, original: int) -> float:
    """Factor on cos and sin (Phi-3; LongRoPE, https://arxiv.org/abs/2402.13753, section 3.2)."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _check_rope(config: Any, family: Family) -> None:
    """Check that each key of `rope_parameters` is in the file, or has the graph's value."""
    rope = rope_of(config)
    if family.rope_by_layer and "full_attention" in config.rope_parameters:
        for name, parameters in config.rope_parameters.items():
            if name not in LAYER_TYPES:
                raise _unsupported(f"rope_parameters: {name}", parameters, family)
        # the graphs scale no RoPE of layers with a window, and few read its base
        window_rope = config.rope_parameters.get("sliding_attention") or {}
        for key, value in window_rope.items():
            unscaled = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
            unscaled["rope_theta"] = value if family.gguf.window_base else rope["rope_theta"]
            if value is not None and not _equal(value, unscaled.get(key)):
                raise _unsupported(f"rope_parameters: sliding_attention: {key}", value, family)
    rope_type = rope.get("rope_type", "default")
    tempered = family.gguf.tempered
    if rope_type not in (*ROPE_TYPES, *family.gguf.rope_factors) or (tempered and rope_type != "yarn"):
        raise _unsupported("rope_parameters: rope_type", rope_type, family)
    fixed = _fixed_rope(config, family, rope_type)
    for key, value in rope.items():
        if key not in fixed and key not in EVERY_ROPE | ROPE_KEYS[rope_type] | (TEMPERED if tempered else set()):
            raise _unsupported(f"rope_parameters: {key}", value, family)
        if key in fixed and not _equal(value, fixed[key]):
            raise _unsupported(f"rope_parameters: {key}", value, family)
    if int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)) % 2:
        raise _unsupported("head_dim", head_dim(config), family)
    if rope_type == "yarn" and not rope.get("truncate", True):
        notice(
            "gguf-yarn",
            "llama.cpp rounds the bounds of yarn's ramp, and this model does not (truncate: false): pairs at both ends"
            " of the ramp rotate at other frequencies, in every GGUF of it",
        )
    if rope_type == "longrope":
        notice(
            "gguf-longrope",
            "llama.cpp chooses the short or the long RoPE factors by the size of its context, transformers by the"
            f" length of the text: for texts within {original_context(config)} tokens, run llama.cpp with"
            f" -c {original_context(config)}",
        )


def _fixed_rope(config: Any, family: Family, rope_type: str) -> Mapping[str, Any]:
    """Keys of `rope_parameters` with the only value that the graph has."""
    fixed: dict[str, Any] = {} if family.gguf.partial_rope else {"partial_rotary_factor": 1.0}
    if rope_type != "yarn":
        return fixed
    if family.gguf.tempered:
        return fixed | YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope = rope_of(config)
    fixed |= YARN | {"attention_factor": 0.1 * math.log(max(scaling_factor(config), 1)) + 1}
    if "truncate" in family.gguf.yarn:  # the export logs it
        fixed["truncate"] = rope.get("truncate")
    has_both = rope.get("mscale") and rope.get("mscale_all_dim") and "attention_factor" not in rope
    # their quotient would be the factor on cos and sin; transformers reads neither one alone
    mscale = (1, 0) if has_both else (rope.get("mscale"), rope.get("mscale_all_dim"))
    return fixed | dict(zip(("mscale", "mscale_all_dim"), mscale, strict=True))


def _equal(value: Any, expected: Any) -> bool:
    numbers = isinstance(value, int | float) and isinstance(expected, int | float)
    return math.isclose(value, expected, rel_tol=1e-5) if numbers else value == expected


def _unsupported(key: str, value: object, family: Family) -> ModelError:
    return ModelError(
        f"config.json: {key}: {value}: llama.cpp's {family.gguf.arch} graph does not support it",
        "serve this model with transformers or vLLM; a key that transformers ignores can be removed from config.json",
    )
