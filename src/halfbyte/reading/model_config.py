"""Readers for a model's config.json and generation_config.json that check values before a library uses them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..utils.errors import CheckpointError
from .files import MEBIBYTE, look
from .json import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
FIX = "re-download config.json, or correct it"
LARGEST_FILE = 16 * MEBIBYTE
LARGEST, MOST_LAYERS = 2**31 - 1, 10_000
EVERY = ("decoder_sparse_step", "full_attention_interval", "attn_layer_period", "expert_layer_period")  # in layers
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # 0 for a dense model
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")  # per token
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions", *EXPERTS, *CHOSEN,
    *EVERY,
)  # fmt: skip
MAY_BE_ZERO = ("intermediate_size", "num_key_value_heads", "max_position_embeddings", *EXPERTS, *CHOSEN)
LAYERS = ("num_hidden_layers", "n_layer")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # the only supported values of transformers_weights
MAPPINGS = ("text_config", "vision_config", "quantization_config", "rope_scaling", "rope_parameters", "auto_map")
TEXTS = ("model_type", "hidden_act", "transformers_version")
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_length", "max_new_tokens")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check config.json of a local model.

    Raises:
        CheckpointError: it cannot be read, or a key is invalid.
    """
    config = _object(folder / CONFIG)
    _check(folder / CONFIG, config)
    if config.get("quantization_config", {}) is None:  # written by merging tools, and accepted by transformers
        del config["quantization_config"]
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Read and check generation_config.json of a local model; empty if there is none.

    Raises:
        CheckpointError: as `read_config`.
    """
    path = folder / GENERATION
    if not look(path, CheckpointError, FIX):
        return {}
    config = _object(path)
    _check_ids(path, config)
    for key in NUMBERS:
        if config.get(key) is not None and type(config[key]) not in (int, float):
            raise _wrong(path, key, "a number", config[key])
    return config


def declared_stop_tokens(folder: Path) -> list[int]:
    """Return the stop tokens in a model's generation_config.json, else in its config.json."""
    stored = read_generation_config(folder).get("eos_token_id")
    if stored is None and look(folder / CONFIG, CheckpointError):
        config = read_config(folder)
        stored = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    return stored if isinstance(stored, list) else [] if stored is None else [stored]


def check_model_config(folder: Path) -> None:
    """Check both files of a local model.

    Raises:
        CheckpointError: as `read_config`.
    """
    read_config(folder)
    read_generation_config(folder)


def _object(path: Path) -> dict[str, Any]:
    config = read_json(path, CheckpointError, FIX.replace(CONFIG, path.name), LARGEST_FILE)
    if not isinstance(config, dict):
        problem = f"{path} holds a {type(config).__name__}, not an object"
        raise CheckpointError(problem, FIX.replace(CONFIG, path.name))
    return config


def _check(path: Path, config: Mapping[str, Any], within: str = "") -> None:
    for key in SIZES:
        value, minimum = config.get(key), 0 if key in MAY_BE_ZERO else 1
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not (type(number) is int and minimum <= number <= LARGEST):
                raise _wrong(path, within + key, f"a whole number, {minimum} or more", value)
    experts = next((number for key in EXPERTS if isinstance(number := config.get(key), int)), 0)
    for key in CHOSEN if experts else ():
        if isinstance(chosen := config.get(key), int) and not 1 <= chosen <= experts:
            raise _wrong(path, within + key, f"1 to {experts} (the number of experts)", chosen)
    for key in LAYERS:
        if isinstance(layers := config.get(key), int) and layers > MOST_LAYERS:
            raise _wrong(path, within + key, f"at most {MOST_LAYERS}", layers)
    for keys, expected_type, words in ((MAPPINGS, dict, "an object"), (TEXTS, str, "text")):
        for key in keys:
            if config.get(key) is not None and not isinstance(config[key], expected_type):
                raise _wrong(path, within + key, words, config[key])
    named = config.get("transformers_weights")
    if named is not None and named not in WEIGHTS:
        raise _wrong(path, within + "transformers_weights", " or ".join(WEIGHTS), named)
    formats = (config.get("quantization_config") or {}).get("formats")
    if formats is not None and not (isinstance(formats, dict) and all(map(_are_texts, formats.values()))):
        raise _wrong(path, within + "quantization_config.formats", "a mapping of formats to names of layers", formats)
    _check_ids(path, config, within)
    if isinstance(text := config.get("text_config"), dict):
        _check(path, text, f"{within}text_config.")


def _check_ids(path: Path, config: Mapping[str, Any], within: str = "") -> None:
    for key in TOKEN_IDS:
        value = config.get(key)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and type(token_id) is not int:
                raise _wrong(path, within + key, "a token's number", value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _wrong(path: Path, key: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{path}: {key} must be {expected}, not {value!r:.80}", FIX.replace(CONFIG, path.name))
