"""A transformers config from a GGUF file's keys: the reverse of `export.gguf.metadata`.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs"). What the file leaves
unsaid is what llama.cpp's graph of the architecture takes for granted.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ...errors import ModelError
from ...notices import notice
from .read import GgufFile

# llama.cpp's architecture → transformers' model type. Files of Mistral say llama; so do those of Mixtral, with experts.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
MOE = {"qwen2moe": False, "qwen3moe": True}  # whether the chosen experts' weights are made to sum to one
WIDE_LAYERS = {"gemma2": 46, "gemma3": 62}  # with this many, attention is scaled by hidden size over heads
WINDOW_EVERY = {"gemma2": 2, "gemma3": 6}  # all layers but every n-th have a sliding window
TAKEN = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor", "attention.sliding_window",
    "attn_logit_softcapping", "final_logit_softcapping", "expert_count", "expert_used_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length",
}  # fmt: skip


def read_config(file: GgufFile) -> Any:
    """The config of the model in `file`; `dtype` is what most weights are stored in, bf16 for quantized ones.

    Raises:
        ModelError: an architecture, or a scaling of RoPE, that is not known here.
        CheckpointError: a key is missing.
    """
    from transformers import AutoConfig

    if file.arch not in MODEL_TYPES:
        raise ModelError(
            f"{file.path} holds a model of architecture {file.arch!r}, which halfbyte does not import",
            f"it imports {', '.join(MODEL_TYPES)}; take the Hugging Face checkpoint",
        )
    for key in ("attention.head_count_kv", "attention.head_count", "feed_forward_length"):
        if isinstance(file.of_arch(key), list):
            raise ModelError(f"{file.path}: {file.arch}.{key} differs between layers", "use the original checkpoint")
    prefix = f"{file.arch}."
    others = sorted(key for key in file.keys if key.startswith(prefix) and key.removeprefix(prefix) not in TAKEN)
    if others:
        notice(f"gguf-keys-{file.path}", f"{file.path}: keys that the model's config does not take over: {others}")
    heads = file.of_arch("attention.head_count")
    head_dim = file.of_arch("attention.key_length", file.of_arch("embedding_length") // heads)
    keys: dict[str, Any] = {
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": file.of_arch("embedding_length"),
        "intermediate_size": file.of_arch("feed_forward_length"),
        "num_hidden_layers": file.of_arch("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.of_arch("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.of_arch("context_length"),
        "rms_norm_eps": file.of_arch("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "rope_parameters": _rope(file, head_dim),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        keys[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id")
    model_type = MODEL_TYPES[file.arch]
    if file.arch == "llama" and file.of_arch("expert_count", 0):
        model_type = "mixtral"
    return AutoConfig.for_model(model_type, **keys | _of_family(file, model_type, head_dim))


def _dtype(file: GgufFile) -> torch.dtype:
    largest = max(file.tensors.values(), key=lambda tensor: tensor.n_elements)
    return {"F32": torch.float32, "F16": torch.float16}.get(largest.tensor_type.name, torch.bfloat16)


def _of_family(file: GgufFile, model_type: str, head_dim: int) -> dict[str, Any]:
    """What only some families have."""
    if model_type == "llama":
        return {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        }  # fmt: skip
    if model_type == "mixtral":
        chosen = file.of_arch("expert_used_count")
        return {"num_local_experts": file.of_arch("expert_count"), "num_experts_per_tok": chosen}
    if file.arch in MOE:
        return _experts(file)
    if model_type == "phi3":
        context = file.of_arch("context_length")
        original = file.of_arch("rope.scaling.original_context_length", context)
        window = file.of_arch("attention.sliding_window", 0) or None
        return {"sliding_window": window, "original_max_position_embeddings": original}
    if file.arch in WINDOW_EVERY:
        layers, every = file.of_arch("block_count"), WINDOW_EVERY[file.arch]
        wide = layers == WIDE_LAYERS[file.arch]
        return {
            "query_pre_attn_scalar": file.of_arch("embedding_length") // file.of_arch("attention.head_count")
            if wide
            else head_dim,
            "sliding_window": file.of_arch("attention.sliding_window"),
            "layer_types": [f"{'sliding' if (i + 1) % every else 'full'}_attention" for i in range(layers)],
            "attn_logit_softcapping": file.get(f"{file.arch}.attn_logit_softcapping"),
            "final_logit_softcapping": file.get(f"{file.arch}.final_logit_softcapping"),
        }
    return {}


def _experts(file: GgufFile) -> dict[str, Any]:
    keys = {
        "num_experts": file.of_arch("expert_count"),
        "num_experts_per_tok": file.of_arch("expert_used_count"),
        "moe_intermediate_size": file.of_arch("expert_feed_forward_length"),
        "norm_topk_prob": MOE[file.arch],
        "decoder_sparse_step": 1,
    }
    if file.arch == "qwen2moe":
        keys["shared_expert_intermediate_size"] = file.of_arch("expert_shared_feed_forward_length")
    return keys


# --- RoPE -------------------------------------------------------------------------------------------------------------


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": file.of_arch("rope.freq_base", 10000.0)} | _scaling(file)
    turned = file.of_arch("rope.dimension_count", head_dim)
    if file.arch == "phi3":
        parameters["partial_rotary_factor"] = turned / head_dim
    elif turned != head_dim:
        raise ModelError(
            f"{file.path}: RoPE turns {turned} of {head_dim} dimensions, which transformers' {file.arch} does not do",
            "use the original checkpoint",
        )
    if file.arch != "gemma3":
        return parameters
    local = file.of_arch("rope.freq_base_swa", 10000.0)
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _scaling(file: GgufFile) -> dict[str, Any]:
    kind = file.of_arch("rope.scaling.type", "none")
    if "rope_factors_short.weight" in file.tensors:
        return _longrope(file)
    if kind == "linear":
        return {"rope_type": "linear", "factor": file.of_arch("rope.scaling.factor")}
    if kind == "yarn":
        original = file.of_arch("rope.scaling.original_context_length")
        factor = file.of_arch("rope.scaling.factor")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if kind != "none":
        raise ModelError(f"{file.path}: RoPE scaling {kind!r} is not imported", "use the original checkpoint")
    if "rope_freqs.weight" in file.tensors:
        factors = file.values("rope_freqs.weight", torch.float32).double().numpy()
        return llama3_parameters(factors, file.of_arch("rope.freq_base", 10000.0))
    return {}


def _longrope(file: GgufFile) -> dict[str, Any]:
    short, long = (file.values(f"rope_factors_{each}.weight", torch.float32).tolist() for each in ("short", "long"))
    original = file.of_arch("rope.scaling.original_context_length")
    factors = [[float(str(np.float32(each))) for each in values] for values in (short, long)]
    found = {"short_factor": factors[0], "long_factor": factors[1], "original_max_position_embeddings": original}
    ratio = file.of_arch("context_length") / original
    usual = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    stored = file.of_arch("rope.scaling.attn_factor", usual)
    own = {} if math.isclose(stored, usual, rel_tol=1e-5) else {"attention_factor": stored}
    return {"rope_type": "longrope"} | found | own


def llama3_parameters(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling from what it divides each frequency by.

    Between the bounds 1/factor is linear in the frequency, which gives two of the three numbers behind the line: the
    context before scaling and its two bounds in turns. The lower one is taken as 1, as all known models have it.

    Args:
        factors: [head_dim / 2].
        theta: the base of the frequencies.

    Raises:
        ModelError: no parameters give these factors.
    """
    frequency = theta ** -(np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    share = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.ones_like(factors)
    between = (share > 1e-4) & (share < 1 - 1e-4)
    if between.sum() >= 2:
        slope, offset = np.polyfit(frequency[between], share[between], 1)
        high = round(1 - 1 / offset, 3)
        original = round(2 * math.pi * slope * (high - 1))
        turns = original * frequency / (2 * math.pi)
        kept = np.clip((turns - 1) / (high - 1), 0, 1)
        if np.allclose(1 / ((1 - kept) / factor + kept), factors, rtol=1e-4):
            return {
                "rope_type": "llama3", "factor": round(factor, 5), "low_freq_factor": 1.0, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }  # fmt: skip
    raise ModelError("rope_freqs.weight: these factors are not those of Llama 3.1", "use the original checkpoint")
