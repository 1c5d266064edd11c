"""Sizes of the decoder layers of a transformers config: some configs give each layer its own.

Gemma 4 has wider heads in its global layers (`per_layer_config`), Gemma 3n a list of MLP widths. Code that reads
`head_dim`, `num_key_value_heads` or `intermediate_size` of a config reads them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a decoder layer; 0 for what the config does not name.

    Attributes:
        heads, key_heads: of attention.
        head_dim: width of a head.
        inner: width of the dense MLP.
    """

    heads: int
    key_heads: int
    head_dim: int
    inner: int


def layer_sizes(text_config: Any) -> list[LayerSizes]:
    """Sizes of every decoder layer.

    Args:
        text_config: of a language model, `config.get_text_config()`.
    """
    own = getattr(text_config, "per_layer_config", None)
    number = getattr(text_config, "num_hidden_layers", 1)  # of one layer alone, where it names no number
    return [_sizes(text_config if own is None else own[index], index) for index in range(number)]


def widest(text_config: Any) -> LayerSizes:
    """The largest of each size among the layers."""
    sizes = layer_sizes(text_config)
    columns = ((each.heads, each.key_heads, each.head_dim, each.inner) for each in sizes)
    return LayerSizes(*map(max, zip(*columns, strict=True)))


def _sizes(config: Any, index: int) -> LayerSizes:
    def size(key: str) -> int:
        found = getattr(config, key, None) or 0
        return int(found[index] if isinstance(found, Sequence) else found)

    heads = size("num_attention_heads")
    head_dim = size("head_dim") or (config.hidden_size // heads if heads else 0)
    return LayerSizes(heads, size("num_key_value_heads") or heads, head_dim, size("intermediate_size"))
