"""RoPE scaling of a run (`rope_scaling`): the options that follow from the model, and the config that has them.

The scaling is applied to transformers' config before anything is built from it, so the memory plan, the patch, the
decoding engines, merges and exports all see a model whose config had it from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.resolved import ORIGINAL_CONTEXT, ROPE_OPTIONS, ROPE_ORDER, RopeScaling
from ..reading import look, read_json
from ..reading.tensors import ADAPTER_AGAIN, OVERRIDES
from ..utils.errors import CheckpointError, ConfigError, ModelError
from ..utils.files import write_json
from ..utils.notices import notice
from .config_facts import max_layer_sizes

KEY = "rope_scaling"
FULL = "full_attention"  # the layers to scale of families whose RoPE differs by layer: others see a window of tokens
LLAMA3 = ("low_freq_factor", "high_freq_factor")
FACTORS = ("short_factor", "long_factor")
OWN_CODE = ("inkling2", "phimoe", "recurrent_gemma")  # families whose code reads other options, or none
UNSCALED = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")  # kept by any scaling


def resolve_rope(config: Any, scaling: RopeScaling) -> dict[str, Any]:
    """Return the options of a RoPE scaling with everything that follows from the model.

    The factor is `length` by the trained context, times the factor of a model that is scaled in the same way already.

    Args:
        config: the model's config, without the scaling.

    Raises:
        ModelError: the family has no RoPE, or one that cannot be scaled.
        ConfigError: `length` is within the trained context, or an option is missing.
    """
    text = config.get_text_config()
    rope = _rope_of(text)
    trained = trained_context(text)
    options, rope_type = dict(scaling.options), scaling.options["rope_type"]
    if text.model_type in OWN_CODE or rope["rope_type"] not in ROPE_OPTIONS:
        wrong = f"{KEY}: {text.model_type} models have a RoPE of their own ({rope['rope_type']}), which is not scaled"
        raise ModelError(wrong, f"remove {KEY}")
    if rope_type == "default":
        if "rope_theta" not in options:
            raise ConfigError(f"{KEY}: rope_type: default needs rope_theta", f"name a type, as in {KEY}: yarn")
        return options
    scaled = rope["rope_type"] == rope_type
    if not scaled and rope["rope_type"] != "default" and "factor" not in options:
        raise ModelError(
            f"{KEY}: {rope_type}: {text.model_type} models of this config scale their RoPE already, by"
            f" {rope['rope_type']}, and two scalings do not add up",
            f"set {KEY}: {rope['rope_type']}, or give a mapping with a factor to replace it",
        )
    if rope_type == "longrope":
        _check_factors(text, rope, options)
    if "factor" not in options:
        if scaling.length <= trained:
            raise ConfigError(
                f"{KEY}: max_length: {scaling.length} is within the {trained} tokens that the model was trained for",
                f"remove {KEY}, raise max_length, or give a mapping with a factor",
            )
        if rope_type == "longrope" and scaled and not options.keys() & set(FACTORS):
            raise ConfigError(
                f"{KEY}: longrope: the model's factors are for {trained} tokens, and others cannot be derived",
                f"give short_factor and long_factor in a mapping, or set max_length: {trained}",
            )
        options["factor"] = (rope.get("factor") or 1.0 if scaled else 1.0) * scaling.length / trained
    options["factor"] = float(options["factor"])
    if rope_type in ("yarn", "llama3", "longrope"):
        original = rope.get(ORIGINAL_CONTEXT) if scaled else None
        options.setdefault(ORIGINAL_CONTEXT, int(original or text.max_position_embeddings))
    if rope_type == "llama3":
        usual = dict(zip(LLAMA3, ROPE_ORDER[LLAMA3], strict=True))
        options = usual | {key: rope[key] for key in LLAMA3 if scaled} | options
    return options


def scale_rope(config: Any, scaling: RopeScaling) -> None:
    """Set a RoPE scaling, and the context that it reaches, in a model's config.

    Raises:
        ModelError: the family has no RoPE, or refuses this scaling.
        ConfigError: as `resolve_rope`.
    """
    text = config.get_text_config()
    trained = trained_context(text)
    rope = _rope_of(text)
    options = resolve_rope(config, scaling)
    scaled, context = rope["rope_type"] == options["rope_type"], scaling.length
    if "factor" in options:
        original = trained / (rope.get("factor") or 1.0) if scaled else options.get(ORIGINAL_CONTEXT, trained)
        context = round(options["factor"] * original)
    if options["rope_type"] == "dynamic":
        options = _fixed_dynamic(text, rope, options["factor"])
    inherited = {key: value for key, value in rope.items() if scaled or key in UNSCALED}
    parameters = {key: value for key, value in (inherited | options).items() if key != "type"}
    if FULL in text.rope_parameters:
        text.rope_parameters = {**text.rope_parameters, FULL: parameters}
    else:
        text.rope_parameters = parameters
    if hasattr(text, ORIGINAL_CONTEXT) and ORIGINAL_CONTEXT in options:  # transformers prefers it (Phi-3)
        setattr(text, ORIGINAL_CONTEXT, options[ORIGINAL_CONTEXT])
    text.max_position_embeddings = max(trained, context)
    try:
        text.validate()
    except Exception as error:  # huggingface_hub's class for what the config's own rules refuse
        reason = str(error.__cause__ or error)
        raise ModelError(f"{KEY}: {text.model_type} models refuse it: {reason}", f"change or remove {KEY}") from error


def trained_context(text: Any) -> int:
    """Return the number of tokens that a model was made for, with the RoPE scaling of its own config."""
    rope = _rope_of(text)
    extended = (rope.get("factor") or 1.0) * (rope.get(ORIGINAL_CONTEXT) or 0)
    return max(int(text.max_position_embeddings), round(extended))


def config_overrides(config: Any) -> dict[str, Any]:
    """Return the keys of config.json that load a base with the RoPE of `config`.

    They are arguments of transformers' `from_pretrained`, and vLLM's `--hf-overrides`.
    """
    text = config.get_text_config()
    keys = {"rope_parameters": text.rope_parameters, "max_position_embeddings": text.max_position_embeddings}
    return keys if text is config else {"text_config": keys}


def write_overrides(folder: Path, config: Any) -> None:
    """Write the file of an adapter's folder from which `saved_rope` and other tools load the base."""
    write_json(folder / OVERRIDES, config_overrides(config))


def saved_rope(adapter: Path) -> RopeScaling | None:
    """Return the RoPE scaling that an adapter was trained with; None: its base's own.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = adapter / OVERRIDES
    if not look(path, CheckpointError, ADAPTER_AGAIN):
        return None
    document = read_json(path, CheckpointError, ADAPTER_AGAIN)
    try:
        keys = document.get("text_config", document)
        rope = keys["rope_parameters"].get(FULL, keys["rope_parameters"])
        names = ("rope_type", *ROPE_OPTIONS[rope["rope_type"]])
        return RopeScaling({key: rope[key] for key in names if key in rope}, int(keys["max_position_embeddings"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has no RoPE parameters that halfbyte wrote", ADAPTER_AGAIN) from error


def check_adapter_rope(adapter: Path, config: Any) -> None:
    """Check that a model has the RoPE that a saved adapter was trained with.

    Args:
        config: the model's config.

    Raises:
        CheckpointError: it has another one.
    """
    if saved_rope(adapter) is None:
        return
    expected = read_json(adapter / OVERRIDES, CheckpointError, ADAPTER_AGAIN)
    expected = expected.get("text_config", expected)["rope_parameters"]
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if rope != expected:
        raise CheckpointError(
            f"{adapter} was trained with the RoPE {expected}, and the model has {rope}",
            f"set {KEY} as in the adapter's run, or merge the adapter and use the merged model",
        )


def set_rope(section: dict[str, Any], text: Any) -> None:
    """Set the RoPE of the scaled config `text` in the language model's section of a config.json, in its layout.

    Files from before transformers 5 keep `rope_scaling` and `rope_theta`, which other tools read.
    """
    parameters = dict(text.rope_parameters)
    if "rope_parameters" in section:
        section["rope_parameters"] = parameters
    else:
        parameters = dict(parameters.get(FULL, parameters))
        section["rope_theta"] = parameters.pop("rope_theta")
        parameters.pop("partial_rotary_factor", None)  # a key of its own there
        section["rope_scaling"] = None if parameters == {"rope_type": "default"} else parameters
    section["max_position_embeddings"] = text.max_position_embeddings
    if ORIGINAL_CONTEXT in section:
        section[ORIGINAL_CONTEXT] = getattr(text, ORIGINAL_CONTEXT)


def _rope_of(text: Any) -> Mapping[str, Any]:
    """Return the RoPE parameters of the layers that attend to all tokens.

    Raises:
        ModelError: the family has no RoPE, or other kinds of layers.
    """
    parameters = getattr(text, "rope_parameters", None)
    unused = getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "rope") != "rope"
    if not parameters or unused or not getattr(text, "max_position_embeddings", None):
        raise ModelError(f"{KEY}: {text.model_type} models have no RoPE to scale", f"remove {KEY}")
    parameters = parameters.get(FULL) or parameters
    if "rope_type" not in parameters:
        layers = ", ".join(map(str, parameters))
        raise ModelError(f"{KEY}: {text.model_type} models rotate layers by {layers}: none of them is scaled alone",
                         f"remove {KEY}")  # fmt: skip
    return parameters


def _fixed_dynamic(text: Any, rope: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the RoPE of dynamic NTK scaling at `factor` times the trained context, for all lengths.

    The base is θ·(f·s − f + 1)^(d/(d−2)) with s = f, as transformers computes it for rows of that length.
    """
    notice(
        KEY,
        f"{KEY}: dynamic changes the frequencies with the length of each batch, which packed rows, CUDA graphs and a"
        f" KV cache cannot follow: all lengths use those of the longest, {factor:g} times the trained context",
    )
    size = int(max_layer_sizes(text).head_dim * rope.get("partial_rotary_factor", 1.0))
    theta = rope["rope_theta"] * (factor * factor - factor + 1) ** (size / (size - 2))
    return {"rope_type": "default", "rope_theta": theta}


def _check_factors(text: Any, rope: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that LongRoPE's factors are there, one for each pair that is rotated."""
    pairs = int(max_layer_sizes(text).head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for key in FACTORS:
        factors = options.get(key, rope.get(key))
        if not isinstance(factors, list):
            wrong = f"{KEY}: longrope needs {key}, found by a search for each model"
            raise ConfigError(wrong, f"give it in a mapping, a list of {pairs} numbers, or set {KEY}: yarn")
        if len(factors) != pairs:
            wrong = f"{KEY}: {key} has {len(factors)} numbers, and the model rotates {pairs} pairs"
            raise ConfigError(wrong, "give one for each pair")
