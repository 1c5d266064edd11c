"""Conversion of a model's config to GGUF keys and back, and of RoPE scaling to tensors and back.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs"). Values that a file
omits are fixed by llama.cpp's graph of the architecture (`graph.fixed_keys`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, RopeScalingType
from torch import Tensor

from ..modeling.config_facts import layer_sizes
from ..modeling.families import FAMILIES, Family
from ..reading.gguf import DAMAGED
from ..utils.errors import CheckpointError, ModelError
from ..utils.notices import notice
from .file import FP32, GgufFile
from .graph import fixed_keys, head_dim, longrope_attention, original_context, rope_of, scaling_factor

# File key → config key, in all families. `modeling.families.Gguf.keys` has further ones.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
EPSILON, LAYER_NORM_EPSILON = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
WINDOW = "attention.sliding_window"  # 0 for none
PER_LAYER = "embedding_length_per_layer_input"  # 0 for none
SECTIONS = "rope.dimension_sections"  # four numbers of pairs: rotated by time, height, width, and an unused one
NEXT_TOKEN_LAYERS = "nextn_predict_layers"  # layers for multi-token prediction; `block_count` includes them
INNER, ATTENTION_EVERY = "ssm.inner_size", "full_attention_interval"  # of hybrid models
FACTOR, ORIGINAL_CONTEXT = "rope.scaling.factor", "rope.scaling.original_context_length"
TRUNCATE = "rope.scaling.truncate"  # of families whose usual value llama.cpp does not have; llama.cpp reads none
# RoPE scaling type (the same name in file and config) → file key → config key.
SCALINGS = {
    "linear": {FACTOR: "factor"},
    "yarn": {FACTOR: "factor", ORIGINAL_CONTEXT: "original_max_position_embeddings"},
}
OTHERS_READ = {
    "vocab_size", "attention.key_length", "attention.value_length", EPSILON, LAYER_NORM_EPSILON,
    "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "rope.scaling.type", FACTOR, ORIGINAL_CONTEXT, "rope.scaling.attn_factor",
    SECTIONS, INNER, ATTENTION_EVERY, TRUNCATE, NEXT_TOKEN_LAYERS,
}  # fmt: skip
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # made from the config
UNROTATED = 1e30  # divisor of a frequency
ORIGINAL = "use the original checkpoint"


def add_hyperparameters(writer: GGUFWriter, config: Any, family: Family, next_token_layers: int = 0) -> None:
    """Write all keys that llama.cpp builds the graph from, out of a transformers (text) config.

    Args:
        next_token_layers: number of layers for multi-token prediction in the file.
    """
    arch, size = family.gguf.arch, head_dim(config)
    writer.add_vocab_size(config.vocab_size)
    for key, value in _sizes(config, family, next_token_layers).items():
        _add(writer, f"{arch}.{key}", value)
    writer.add_key_length(size)
    writer.add_value_length(size)
    if family.layer_norm:
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, family.gguf.norm))
    _add_rope(writer, config, family)
    if family.gguf.layered:
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        narrow = min(layer.head_dim for layer in layer_sizes(config))
        writer.add_sliding_window_pattern(windowed)
        writer.add_key_length_swa(narrow)
        writer.add_value_length_swa(narrow)
        writer.add_rope_dimension_count_swa(narrow)
    if every := family.gguf.attention_every:
        writer.add_full_attention_interval(every)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    for key, name in family.gguf.keys.items():
        value = getattr(config, name)
        if value is not None or key in (WINDOW, PER_LAYER):
            _add(writer, f"{arch}.{key}", value or 0)
    for key, value in family.gguf.constants.items():
        _add(writer, f"{arch}.{key}", value)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif key.endswith(FP32):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def written_keys(config: Any, family: Family, next_token_layers: int = 0) -> dict[str, object]:
    """Keys of a language model's file to verify after writing."""
    arch = family.gguf.arch
    sizes = _sizes(config, family, next_token_layers)
    return {"general.architecture": arch} | {f"{arch}.{key}": value for key, value in sizes.items()}


def _sizes(config: Any, family: Family, next_token_layers: int) -> dict[str, Any]:
    """File key → value, for the keys of `_keys` and the multi-token prediction layers."""
    by_layer = _layered_sizes(config) if family.gguf.layered else {}
    if family.gguf.short_conv:
        heads = config.num_key_value_heads
        by_layer["attention.head_count_kv"] = [0 if kind == "conv" else heads for kind in config.layer_types]
        by_layer["feed_forward_length"] = _adjusted_width(config)
    sizes = {key: getattr(config, name) for key, name in _keys(family).items() if key not in by_layer} | by_layer
    if next_token_layers:
        sizes |= {"block_count": sizes["block_count"] + next_token_layers, NEXT_TOKEN_LAYERS: next_token_layers}
    return sizes


def _layered_sizes(config: Any) -> dict[str, Any]:
    """File key → one number per layer; MLPs of layers that share keys and values may have double width."""
    layers = layer_sizes(config)
    wide = len(layers) - config.num_kv_shared_layers if config.use_double_wide_mlp else len(layers)
    return {
        "attention.head_count_kv": [layer.key_heads for layer in layers],
        "feed_forward_length": [layer.mlp_width * (2 if index >= wide else 1) for index, layer in enumerate(layers)],
    }


def _adjusted_width(config: Any) -> int:
    """Width of LFM2's MLP: two thirds of the config's times a factor, rounded up."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if config.block_ffn_dim_multiplier is not None:
            width = int(config.block_ffn_dim_multiplier * width)
        width = math.ceil(width / config.block_multiple_of) * config.block_multiple_of
    return width


def _keys(family: Family) -> dict[str, str]:
    return {key: name for key, name in KEYS.items() if key not in family.gguf.without}


def read_config(file: GgufFile) -> Any:
    """Read the transformers config of the model in `file`; its dtype is the largest tensor's, bf16 if quantized.

    Raises:
        ModelError: an unsupported architecture or RoPE scaling.
        CheckpointError: a key is missing.
    """
    from transformers import AutoConfig

    family = _family_in(file)
    for key in ("attention.head_count_kv", "attention.head_count", "feed_forward_length"):
        if key not in family.gguf.without and isinstance(file.of_arch(key), list):
            raise ModelError(f"{file.path}: {file.arch}.{key} differs between layers", ORIGINAL)
    prefix = f"{file.arch}."
    read = OTHERS_READ.union(KEYS, family.gguf.constants, *(row.gguf.keys for row in FAMILIES))
    ignored = sorted(key for key in file.keys if key.startswith(prefix) and key.removeprefix(prefix) not in read)
    if ignored:
        notice(f"gguf-keys-{file.path}", f"{file.path}: the import ignores these keys: {ignored}")
    if file.of_arch("block_count") > len(file.tensors):
        raise CheckpointError(f"{file.path} has fewer tensors than layers ({file.arch}.block_count)", DAMAGED)
    heads, hidden = file.of_arch("attention.head_count"), file.of_arch("embedding_length")
    size = file.of_arch("attention.key_length", hidden // heads)
    keys: dict[str, Any] = {
        name: file.of_arch(key, heads if key == "attention.head_count_kv" else None)
        for key, name in _keys(family).items()
    }
    keys["num_hidden_layers"] -= file.of_arch(NEXT_TOKEN_LAYERS, 0)
    largest = max(file.tensors.values(), key=lambda tensor: tensor.n_elements)
    keys |= {
        "vocab_size": file.shape("token_embd.weight")[0],
        "head_dim": size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": {"F32": torch.float32, "F16": torch.float16}.get(largest.tensor_type.name, torch.bfloat16),
        "rope_parameters": _read_rope(file, family, size),
    }
    epsilon = ("layer_norm_eps", LAYER_NORM_EPSILON) if family.layer_norm else ("rms_norm_eps", EPSILON)
    keys[epsilon[0]] = file.of_arch(epsilon[1])
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        keys[f"{name}_token_id"] = file.get(f"tokenizer.ggml.{key}_token_id")
    keys |= fixed_keys(family, keys["num_hidden_layers"], hidden, heads, size) | _read_family_keys(file, family)
    return AutoConfig.for_model(family.model_type, **keys)


def _family_in(file: GgufFile) -> Family:
    """Find the family of the model in `file`.

    Files of Mistral and Mixtral have the architecture "llama", Mixtral's with experts; Olmo 3's are Olmo 2's with a
    sliding window.
    """
    importable = [family for family in FAMILIES if family.gguf.imported]
    candidates = [family for family in importable if family.gguf.arch == file.arch]
    if not candidates:
        archs = ", ".join(dict.fromkeys(family.gguf.arch for family in importable))
        raise ModelError(
            f"{file.path} holds a model of architecture {file.arch!r}, which halfbyte does not import",
            f"it imports {archs}; use the Hugging Face checkpoint",
        )
    experts, windowed = bool(file.of_arch("expert_count", 0)), bool(file.of_arch(WINDOW, 0))
    likely = [family for family in candidates if bool(family.experts) == experts] or candidates
    return next((family for family in likely if bool(family.gguf.window_every) == windowed), likely[0])


def _read_family_keys(file: GgufFile, family: Family) -> dict[str, Any]:
    """Read the config keys that only some families have."""
    graph, values = family.gguf, {}
    for key, name in graph.keys.items():
        values[name] = file.of_arch(key, 0 if key in graph.optional else None) or None
    for name, tensor in graph.bias_keys.items():
        values[name] = f"blk.0.{tensor if '.' in tensor else f'{tensor}.bias'}" in file.tensors
    if graph.attention_every:
        values |= _read_delta_net(file, graph.attention_every)
    if graph.original_context:
        values["original_max_position_embeddings"] = file.of_arch(ORIGINAL_CONTEXT, file.of_arch("context_length"))
    return values


def _read_delta_net(file: GgufFile, every: int) -> dict[str, int]:
    """Read and check the head sizes of a hybrid's Gated DeltaNet layers."""
    if (stored := file.of_arch(ATTENTION_EVERY, every)) != every:
        wrong = f"{file.path}: attention in every {stored}th layer ({file.arch}.{ATTENTION_EVERY}) is not imported"
        raise ModelError(wrong, ORIGINAL)
    size, keys, values = (file.of_arch(f"ssm.{key}") for key in ("state_size", "group_count", "time_step_rank"))
    if file.of_arch(INNER) != size * values or values % max(keys, 1):
        wrong = f"{file.path}: {file.arch}.{INNER} is {file.of_arch(INNER)}, which does not fit {keys} key heads and"
        raise CheckpointError(f"{wrong} {values} value heads of width {size}", DAMAGED)
    return {"linear_value_head_dim": size}


# --- RoPE -------------------------------------------------------------------------------------------------------------


def _add_rope(writer: GGUFWriter, config: Any, family: Family) -> None:
    rope = rope_of(config)
    share = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
    rotated = int(head_dim(config) * share)
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope["rope_theta"])
    if family.gguf.window_base:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if sections := rope.get("mrope_section") or family.gguf.sections:
        if 2 * sum(sections) != rotated:  # the graph would rotate the other pairs by position 0
            wrong = f"config.json: rope_parameters: mrope_section {list(sections)} does not sum to the"
            raise ModelError(
                f"{wrong} {rotated // 2} pairs that RoPE rotates",
                "correct it: the model's original config has the right one",
            )
        writer.add_rope_dimension_sections([*sections, 0])
    rope_type = rope.get("rope_type", "default")
    if rope_type in SCALINGS:
        writer.add_rope_scaling_type(RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(scaling_factor(config))
        if ORIGINAL_CONTEXT in SCALINGS[rope_type]:
            writer.add_rope_scaling_orig_ctx_len(original_context(config))
        if rope_type == "yarn" and "truncate" in family.gguf.yarn:
            writer.add_bool(f"{writer.arch}.{TRUNCATE}", rope.get("truncate", True))
        if family.gguf.tempered:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    elif rope_type == "longrope":
        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(original_context(config))
        usual = longrope_attention(scaling_factor(config), original_context(config))
        writer.add_rope_scaling_attn_factors(float(rope.get("attention_factor") or usual))


def rope_tensors(config: Any) -> dict[str, Tensor]:
    """Tensors of the file that encode RoPE scaling: the divisor of each frequency, fp32 [head_dim / 2]."""
    rope = rope_of(config)
    rope_type = rope.get("rope_type", "default")
    if rope_type == "llama3":
        return {"rope_freqs.weight": llama3_factors(rope, head_dim(config))}
    if rope_type == "proportional":  # the first pairs rotate, the others stay
        pairs = head_dim(config) // 2
        rotated = int(pairs * rope.get("partial_rotary_factor", 1.0))
        return {"rope_freqs.weight": torch.tensor([1.0] * rotated + [UNROTATED] * (pairs - rotated))}
    if rope_type == "longrope":
        return {f"rope_factors_{name}.weight": torch.tensor(rope[f"{name}_factor"]) for name in ("long", "short")}
    return {}


def llama3_factors(rope: dict[str, Any], size: int) -> Tensor:
    """Divisors of Llama 3.1: `factor` for low frequencies, 1 for high ones, interpolated in between.

    Args:
        rope: RoPE parameters of a config.
        size: head width.
    """
    frequency = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)  # 1: unchanged
    return (1 / ((1 - share) / rope["factor"] + share)).float()


def llama3_parameters(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Recover the parameters of Llama 3.1's RoPE scaling from its frequency divisors.

    Between the bounds 1/factor is linear in the frequency. The line gives two of three unknowns (original context,
    lower and upper bound in rotations), so the lower bound is assumed to be close to 1, as in all known models.

    Args:
        factors: divisor of each frequency, [head_dim / 2].
        theta: base of the frequencies.

    Raises:
        ModelError: no parameters give these factors.
    """
    frequency = theta ** -(np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    share = (1 / factors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.ones_like(factors)
    scaled, unchanged = _ramp(frequency, share)
    context = max(1, round(2 * math.pi / scaled))
    for digits in (3, 9):
        parameters = {
            "rope_type": "llama3", "factor": round(factor, 5),
            "low_freq_factor": round(context * scaled / (2 * math.pi), digits),
            "high_freq_factor": round(context * unchanged / (2 * math.pi), digits),
            "original_max_position_embeddings": context,
        }  # fmt: skip
        if np.allclose(llama3_factors(parameters | {"rope_theta": theta}, 2 * len(factors)), factors, rtol=1e-4):
            return parameters
    raise ModelError("rope_freqs.weight: these factors are not Llama 3.1's", ORIGINAL)


def _ramp(frequency: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """Frequencies at which a line through the shares between 0 and 1 is 0 and 1; a model may have few pairs there."""
    between = (share > 1e-4) & (share < 1 - 1e-4)
    if between.sum() >= 2:
        slope, offset = np.polyfit(frequency[between], share[between], 1)
        return float(-offset / slope), float((1 - offset) / slope)
    middle = float(frequency[between][0]) if between.any() else None
    scaled, unscaled = frequency[share <= 1e-4], frequency[share >= 1 - 1e-4]
    low = float(scaled.max()) if len(scaled) else (middle or float(unscaled.min())) / 2
    high = float(unscaled.min()) if len(unscaled) else 2 * (middle or low)
    if middle is None:
        return low, high
    value = float(share[between][0])
    slope = max(value / (middle - low), (1 - value) / (high - middle))
    return middle - value / slope, middle + (1 - value) / slope


def _read_rope(file: GgufFile, family: Family, size: int) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": file.of_arch("rope.freq_base", 10000.0)} | _scaling(file)
    if parameters["rope_type"] == "yarn":
        parameters |= family.gguf.yarn
        if (truncate := file.get(f"{file.arch}.{TRUNCATE}")) is not None:
            parameters["truncate"] = bool(truncate)
    rotated = file.of_arch("rope.dimension_count", size)
    if family.gguf.partial_rope:
        parameters["partial_rotary_factor"] = rotated / size
        if family.gguf.sections:
            parameters |= {"mrope_section": file.of_arch(SECTIONS)[:3], "mrope_interleaved": True}
    elif rotated != size:
        raise ModelError(
            f"{file.path}: RoPE rotates {rotated} of {size} dimensions, and transformers' {file.arch} all of them",
            ORIGINAL,
        )
    if not family.rope_by_layer:
        return parameters
    usual = 10000.0 if family.gguf.window_base else parameters["rope_theta"]
    local = file.of_arch("rope.freq_base_swa", usual)
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _scaling(file: GgufFile) -> dict[str, Any]:
    rope_type = file.of_arch("rope.scaling.type", "none")
    if "rope_factors_short.weight" in file.tensors:
        return _longrope(file)
    if rope_type in SCALINGS:
        return {"rope_type": rope_type} | {name: file.of_arch(key) for key, name in SCALINGS[rope_type].items()}
    if rope_type != "none":
        raise ModelError(f"{file.path}: RoPE scaling {rope_type!r} is not imported", ORIGINAL)
    if "rope_freqs.weight" in file.tensors:
        factors = file.values("rope_freqs.weight", torch.float32).double().numpy()
        return llama3_parameters(factors, file.of_arch("rope.freq_base", 10000.0))
    return {}


def _longrope(file: GgufFile) -> dict[str, Any]:
    original = file.of_arch(ORIGINAL_CONTEXT)
    rope: dict[str, Any] = {"rope_type": "longrope"}
    for length in ("short", "long"):
        factors = file.values(f"rope_factors_{length}.weight", torch.float32)
        rope[f"{length}_factor"] = [float(str(np.float32(factor))) for factor in factors.tolist()]
    rope["original_max_position_embeddings"] = original
    usual = longrope_attention(file.of_arch("context_length") / original, original)
    stored = file.of_arch("rope.scaling.attn_factor", usual)
    return rope if math.isclose(stored, usual, rel_tol=1e-5) else rope | {"attention_factor": stored}
