"""Keys of a GGUF file that describe a model and do not change its logits: licence, names, sampling defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gguf import GGUFWriter

from .file import GgufFile

CONFIG_KEY = "gguf_general"  # key of an imported checkpoint's config.json; exports write its entries again
DESCRIPTIONS = (
    "author", "organization", "basename", "size_label", "license", "license.name", "license.link", "version", "url",
)  # fmt: skip
# Key of generation_config.json → key of a file, and whether it is a whole number.
SAMPLING = {
    "temperature": ("general.sampling.temp", False),
    "top_k": ("general.sampling.top_k", True),
    "top_p": ("general.sampling.top_p", False),
    "min_p": ("general.sampling.min_p", False),
    "repetition_penalty": ("general.sampling.penalty_repeat", False),
}


def add_general(writer: GGUFWriter, config: Any, generation: Mapping[str, Any]) -> None:
    """Write author, licence and names from the imported base's GGUF file, and the sampling defaults.

    Args:
        config: transformers config.
        generation: contents of generation_config.json; its sampling keys count with `do_sample`.
    """
    descriptions: Mapping[str, Any] = getattr(config, CONFIG_KEY, None) or {}
    for name in DESCRIPTIONS:
        if isinstance(text := descriptions.get(name), str):
            writer.add_string(f"general.{name}", text)
    if generation.get("do_sample"):
        for name, (key, is_integer) in SAMPLING.items():
            value: Any = generation.get(name)
            if _is_number(value):
                add = writer.add_int32 if is_integer else writer.add_float32
                add(key, value)


def read_descriptions(file: GgufFile) -> dict[str, str]:
    """Read the texts that `add_general` writes."""
    texts = {name: file.get(f"general.{name}") for name in DESCRIPTIONS}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_sampling(file: GgufFile) -> dict[str, Any]:
    """Read sampling defaults as keys of generation_config.json."""
    values = {name: file.get(key) for name, (key, _) in SAMPLING.items()}
    numbers = {name: value for name, value in values.items() if _is_number(value)}
    return {"do_sample": True} | numbers if numbers else {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
