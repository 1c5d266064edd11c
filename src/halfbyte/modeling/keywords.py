"""Keyword arguments that transformers hands to the forwards of backbones, layers and attention.

transformers 5.24 renamed `past_key_values` and `cache_params` to `cache`; 5.17 to 5.23 have the old names. A fused
forward that ignored a keyword of a newer version would compute something else without an error, so it raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers

from ..utils.errors import ModelError

CACHES = ("cache", "past_key_values", "cache_params")
# What transformers passes through all layers, and fused forwards have no use for or compute themselves: outputs that
# hooks collect, counts for its losses, bounds of documents under its names, positions that rotary angles were made of.
WITHOUT_MEANING = frozenset({
    "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "num_items_in_batch", "labels", "shift_labels", "logits_to_keep", "position_ids", "seq_idx", "is_causal",
    "cu_seq_lens_k", "max_length_k", "token_type_ids", "mm_token_type_ids", "per_layer_input", "layer_idx",
})  # fmt: skip


def cache_name(model: Any) -> str:
    """Return the name under which a model takes its key-value cache, and returns it."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHES[:2] if name in taken), "past_key_values")


def cache_of(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key-value cache among keyword arguments as {its name here: the cache}; empty where there is none."""
    return {name: keywords[name] for name in CACHES if keywords.get(name) is not None}


def check_known(module: Any, keywords: Mapping[str, Any], known: frozenset[str] = frozenset()) -> None:
    """Raise where a forward of ours was given a keyword that it does not know.

    Args:
        module: whose forward it is.
        keywords: what is left of the arguments; None stands for a keyword that was not given.
        known: further names that the forward reads.

    Raises:
        ModelError: names the keyword, the class and the version of transformers.
    """
    for name, value in keywords.items():
        if value is not None and name not in WITHOUT_MEANING and name not in known and name not in CACHES:
            raise ModelError(
                f"transformers {transformers.__version__} gives {type(module).__name__} the argument {name!r}, which"
                " halfbyte's fused forward does not know",
                "set use_kernels: false (without patch: transformers' own forwards), or use a version of transformers"
                " that halfbyte supports",
            )
