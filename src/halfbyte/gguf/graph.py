"""Config values that llama.cpp's graph of a family fixes, and the check that a model has them.

Export refuses a model with another value and names the key, because llama.cpp would load the file and compute something
else. Import sets the keys to the graph's values.
"""

from __future__ import annotations

from typing import Any

from ..modeling.config_facts import max_layer_sizes
from ..modeling.families import FAMILIES, Family, family_of_config
from ..utils.errors import ModelError
from ..utils.notices import notice


def head_dim(config: Any) -> int:
    """Width of an attention head."""
    return max_layer_sizes(config).head_dim


def experts_of(config: Any, family: Family) -> int:
    """Number of experts per layer; 0 for a dense model."""
    return int(getattr(config, family.experts.count)) if family.experts else 0


def fixed_keys(family: Family, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Config keys with their only supported value in the graph of a model of these sizes."""
    graph = family.gguf
    found = dict(graph.fixed)
    if graph.wide_layers:
        found["query_pre_attn_scalar"] = hidden // heads if layers == graph.wide_layers else head_dim
    if graph.window_every:
        kinds = ("sliding" if (layer + 1) % graph.window_every else "full" for layer in range(layers))
        found["layer_types"] = [f"{kind}_attention" for kind in kinds]
    if graph.attention_every:
        kinds = ("linear" if (layer + 1) % graph.attention_every else "full" for layer in range(layers))
        found["layer_types"] = [f"{kind}_attention" for kind in kinds]
    if not graph.grouped:
        found["num_key_value_heads"] = heads
    if graph.unrotated_every:
        found["no_rope_layers"] = [int((layer + 1) % graph.unrotated_every > 0) for layer in range(layers)]
    return found


def checked_family(config: Any) -> Family:
    """Return the family of a transformers (text) config after checking that llama.cpp's graph supports it.

    Raises:
        ModelError: the unsupported family or config key.
    """
    family = family_of_config(config)
    if family is None or not family.gguf.arch:
        known = ", ".join(sorted(each.model_type for each in FAMILIES if each.gguf.arch))
        raise ModelError(f"GGUF export does not know {config.model_type} models", f"it knows {known}")
    activation = getattr(config, family.activation)
    if activation not in family.gguf.activations:
        raise _unsupported("hidden_act", activation, family)
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, head_dim(config)
    for key, wanted in fixed_keys(family, *sizes).items():
        value = getattr(config, key)
        if (value or None) != (wanted or None):
            raise _unsupported(key, value, family)
    if family.gguf.attention_every and config.linear_value_head_dim != config.linear_key_head_dim:
        raise _unsupported("linear_value_head_dim", config.linear_value_head_dim, family)  # the graph has one width
    windowed = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
    if windowed and not family.gguf.window_every:
        notice(
            "gguf-window",
            f"llama.cpp ignores this family's sliding_window: beyond {config.sliding_window} tokens its answers differ"
            " from transformers'",
        )
    return family


def _unsupported(key: str, value: object, family: Family) -> ModelError:
    return ModelError(
        f"config.json: {key}: {value}: llama.cpp's {family.gguf.arch} graph does not support it",
        "serve this model with transformers or vLLM",
    )
