"""The model families that export knows: llama.cpp's architecture for each, and what that one takes for granted.

A row is what a family's graph in llama.cpp does with the tensors (src/models/*.cpp there). What a checkpoint asks for
beyond that is refused here, by the name of its key, because the file would load and compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gguf import MODEL_ARCH

from halfbyte.errors import ModelError
from halfbyte.notices import notice


@dataclass(frozen=True)
class Family:
    """One row.

    Args:
        arch: llama.cpp's architecture.
        permute: RoPE turns neighbouring pairs, where transformers turns halves: rows of q and k are reordered.
        norm_offset: RMSNorm multiplies by 1 + weight; the file holds the sum.
        bias: linears may have biases.
        activation: of the MLP, in transformers' names.
        window_every: layers with a sliding window: all but every n-th; 0: the architecture has no window.
        normalized_experts: the router's weights of the chosen experts sum to one.
        wide_layers: with this many layers, attention is scaled by hidden size over heads, not by the head's size.
    """

    arch: MODEL_ARCH
    permute: bool = False
    norm_offset: bool = False
    bias: bool = False
    activation: tuple[str, ...] = ("silu", "swish")
    window_every: int = 0
    normalized_experts: bool = True
    wide_layers: int = 0


GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # Gemma 1's config says gelu and means the tanh form
FAMILIES = {
    "llama": Family(MODEL_ARCH.LLAMA, permute=True, bias=True),
    "mistral": Family(MODEL_ARCH.LLAMA, permute=True),
    "mixtral": Family(MODEL_ARCH.LLAMA, permute=True),
    "qwen2": Family(MODEL_ARCH.QWEN2, bias=True),
    "qwen2_5_vl_text": Family(MODEL_ARCH.QWEN2VL, bias=True),
    "qwen3": Family(MODEL_ARCH.QWEN3),
    "qwen2_moe": Family(MODEL_ARCH.QWEN2MOE, bias=True, normalized_experts=False),
    "qwen3_moe": Family(MODEL_ARCH.QWEN3MOE),
    "gemma": Family(MODEL_ARCH.GEMMA, norm_offset=True, activation=GELU),
    "gemma2": Family(MODEL_ARCH.GEMMA2, norm_offset=True, activation=GELU, window_every=2, wide_layers=46),
    "gemma3_text": Family(MODEL_ARCH.GEMMA3, norm_offset=True, activation=GELU, window_every=6, wide_layers=62),
    "phi3": Family(MODEL_ARCH.PHI3),
}


def family_of(config: Any) -> Family:
    """The row of a (text) config of transformers.

    Raises:
        ModelError: a family, or a key of the config, that the file could not stand for.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"GGUF export does not know {config.model_type} models", f"it knows {', '.join(sorted(FAMILIES))}"
        )
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in family.activation:
        raise _unlike("hidden_act", activation, family)
    if config.model_type in ("qwen2_moe", "qwen3_moe"):
        _check_experts(config, family)
    _check_attention(config, family)
    return family


def head_dim(config: Any) -> int:
    """Size of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _unlike(key: str, value: object, family: Family) -> ModelError:
    return ModelError(
        f"config.json: {key}: {value}: llama.cpp's {family.arch.name.lower()} graph has no such thing",
        "serve this model with transformers or vLLM",
    )


def _check_experts(config: Any, family: Family) -> None:
    if bool(config.norm_topk_prob) != family.normalized_experts:
        raise _unlike("norm_topk_prob", config.norm_topk_prob, family)
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        key = "mlp_only_layers" if config.mlp_only_layers else "decoder_sparse_step"
        raise _unlike(key, getattr(config, key), family)


def _check_attention(config: Any, family: Family) -> None:
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar is not None:
        wide = family.wide_layers == config.num_hidden_layers
        expected = config.hidden_size // config.num_attention_heads if wide else head_dim(config)
        if scalar != expected:
            raise _unlike("query_pre_attn_scalar", scalar, family)
    if family.window_every:
        kinds = [(layer + 1) % family.window_every != 0 for layer in range(config.num_hidden_layers)]
        if [kind == "sliding_attention" for kind in config.layer_types] != kinds:
            raise _unlike("layer_types", "another order of sliding and full attention", family)
    elif getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        notice(
            "gguf-window",
            f"llama.cpp attends to everything in this family: beyond {config.sliding_window} tokens (sliding_window)"
            " its answers differ from those of transformers",
        )
