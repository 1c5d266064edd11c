"""Facts of a transformers config that several rooms need: sizes of its layers, and what its attention requires.

Some configs give each layer its own sizes: Gemma 4 has wider heads in its global layers (`per_layer_config`), Gemma 3n
a list of MLP widths. Code that needs `head_dim`, `num_key_value_heads` or `intermediate_size` reads them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .families import family_of_config


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a decoder layer; 0 for sizes that the config does not name.

    Attributes:
        heads, key_heads: number of attention heads of queries, and of keys and values.
        head_dim: width of a head.
        mlp_width: width of the dense MLP.
    """

    heads: int
    key_heads: int
    head_dim: int
    mlp_width: int

    @property
    def key_width(self) -> int:
        """Width of all keys of a token."""
        return self.key_heads * self.head_dim


def layer_sizes(text_config: Any) -> list[LayerSizes]:
    """Return the sizes of every decoder layer.

    Args:
        text_config: a language model's config, `config.get_text_config()`.
    """
    per_layer = getattr(text_config, "per_layer_config", None)
    count = getattr(text_config, "num_hidden_layers", 1)  # a config without this key describes one layer
    return [_sizes(text_config if per_layer is None else per_layer[index], index) for index in range(count)]


def max_layer_sizes(text_config: Any) -> LayerSizes:
    """Return the maximum of each size over the layers."""
    sizes = layer_sizes(text_config)
    columns = ((layer.heads, layer.key_heads, layer.head_dim, layer.mlp_width) for layer in sizes)
    return LayerSizes(*map(max, zip(*columns, strict=True)))


def _sizes(config: Any, index: int) -> LayerSizes:
    def size(key: str) -> int:
        value = getattr(config, key, None) or 0
        return int(value[index] if isinstance(value, Sequence) else value)

    heads = size("num_attention_heads")
    head_dim = size("head_dim") or (config.hidden_size // heads if heads else 0)
    return LayerSizes(heads, size("num_key_value_heads") or heads, head_dim, size("intermediate_size"))


def is_capped(config: Any) -> bool:
    """Return whether attention scores are capped (Gemma 2)."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def has_sinks(config: Any) -> bool:
    """Return whether the attention uses learned sinks (gpt-oss)."""
    family = family_of_config(config) if hasattr(config, "model_type") else None
    return family is not None and family.sinks


def has_custom_scores(config: Any) -> bool:
    """Return whether scores are capped or have sinks: SDPA supports neither, so transformers runs eager attention."""
    return is_capped(config) or has_sinks(config)


def default_attention(text_config: Any) -> str | None:
    """Return the `attn_implementation` to load a model with if the run names none; None: transformers' default.

    Gemma 2 needs "eager": SDPA leaves scores uncapped, silently before transformers 5.23.
    """
    return "eager" if is_capped(text_config) else None
