"""Hyperparameters of a model as GGUF's keys, and the tensors that stand for its RoPE scaling.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType
from torch import Tensor

from halfbyte.errors import ModelError

from .families import Family, head_dim


def add_hyperparameters(writer: GGUFWriter, config: Any, family: Family) -> None:
    """Everything llama.cpp needs to build the graph, from a (text) config of transformers."""
    size = head_dim(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(int(size * _rope(config).get("partial_rotary_factor", 1.0)))
    _add_rope(writer, config, family)
    if family.window_every or family.arch == MODEL_ARCH.PHI3:
        writer.add_sliding_window(config.sliding_window or 0)
    if cap := getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(cap)
    if cap := getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(cap)
    if experts := experts_of(config):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hidden := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(hidden)
        if shared := getattr(config, "shared_expert_intermediate_size", None):
            writer.add_expert_shared_feed_forward_length(shared)


def experts_of(config: Any) -> int:
    """How many experts a layer has; 0 for a dense model."""
    return int(getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0) or 0)


def _rope(config: Any) -> dict[str, Any]:
    """RoPE parameters of the layers with full attention."""
    parameters = config.rope_parameters
    return dict(parameters.get("full_attention", parameters))


def _add_rope(writer: GGUFWriter, config: Any, family: Family) -> None:
    rope = _rope(config)
    writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if sections := rope.get("mrope_section"):  # pairs that turn with time, height and width
        writer.add_rope_dimension_sections([*sections, 0])
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        if rope.get("attention_factor") or rope.get("mscale"):
            raise ModelError("config.json: rope_parameters: yarn with an attention factor of its own is not exported")
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind == "longrope":
        original = _original_context(config, rope)
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(_longrope_factor(config, rope, original))
    elif kind not in ("default", "llama3"):
        raise ModelError(
            f"config.json: rope_parameters: rope_type {kind} has no counterpart in llama.cpp",
            "default, linear, llama3, yarn and longrope have",
        )


def _original_context(config: Any, rope: dict[str, Any]) -> int:
    given = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return int(given or config.max_position_embeddings)


def _longrope_factor(config: Any, rope: dict[str, Any], original: int) -> float:
    """What cos and sin are multiplied by (Phi-3; LongRoPE, https://arxiv.org/abs/2402.13753, section 3.2)."""
    if rope.get("attention_factor"):
        return float(rope["attention_factor"])
    factor = config.max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Tensors of the file that are made from the config: by what each frequency is divided, fp32 [head's half]."""
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config, rope)}
    if kind == "longrope":
        return {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    return {}


def _llama3_factors(config: Any, rope: dict[str, Any]) -> Tensor:
    """Llama 3.1: low frequencies are divided by `factor`, high ones stay, those between are interpolated."""
    size = head_dim(config)
    frequency = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: kept as it is
    return (1 / ((1 - share) / rope["factor"] + share)).float()
