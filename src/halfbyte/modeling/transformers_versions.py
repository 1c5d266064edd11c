"""Differences between the supported versions of transformers, 5.17 to 5.24: all code that depends on a version.

5.17 checkpoints activations in `GradientCheckpointingLayer.__call__`, indexes the shared keys of Gemma 3n by layer
number, and casts E4M3 codes while it loads. 5.23 checkpoints in a wrapper of the class's forward and renames
`gradient_checkpointing_enable`. 5.24 renames the keywords of key-value caches.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from ..formats.base import FLOATS

CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")
# Whether a forward that is bound to a layer must checkpoint itself.
CHECKPOINTS_FORWARD = "__call__" not in GradientCheckpointingLayer.__dict__


def given_cache(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return {keyword: key-value cache} for the cache among `keywords`; empty if there is none."""
    return {name: keywords[name] for name in CACHE_KEYWORDS if keywords.get(name) is not None}


def enable_checkpointing(model: Any) -> None:
    """Enable transformers' own checkpointing of all layers, non-reentrant, so gradients reach adapters.

    transformers also hooks the embeddings to require gradients. The hook is removed: it would compute an unused
    gradient, and make generation run transformers' own forward.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.disable_input_require_grads()


def shared_states_keys(attention: Any) -> tuple[Any, Any]:
    """Return the keys in `shared_kv_states` under which a layer reads, and writes, its keys and values."""
    if hasattr(attention, "kv_shared_layer_index"):
        return attention.kv_shared_layer_index, attention.layer_idx
    return attention.layer_type, attention.layer_type


def original_codes(codes: Tensor) -> Tensor:
    """Undo a cast of E4M3 codes to the model's dtype, which is exact."""
    if codes.dtype not in FLOATS:
        return codes
    cast = codes.to(torch.float8_e4m3fn)
    return cast if torch.equal(cast.to(codes.dtype), codes) else codes


@contextlib.contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress warnings of PEFT 0.21 that users cannot act on: names that transformers 5.23 deprecates, patterns, ties.

    PEFT compares patterns with module names only, not with parameters; `adapters.lora` checks both, and tied weights.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        yield
