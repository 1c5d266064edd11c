"""Which keys quantization-aware training contradicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .yaml import dump_value


def qat_contradictions(config: Any) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, fix), of a `RunConfig`."""
    if config.qat_scheme is None:
        return
    chosen = dump_value("qat_scheme", config.qat_scheme)
    if config.quantized:
        key = "quantization" if config.quantization else "load_in_4bit"
        said = dump_value(key, getattr(config, key))
        wrong = f"{chosen} with {said}: it trains 16-bit weights to be rounded later, and those are rounded already"
        yield key, wrong, f"set {key}: {'16bit' if config.quantization else 'false'}, or remove qat_scheme"
    for key, default in (("quant_type", "nf4"), ("blocksize", 64), ("use_double_quant", True)):
        value = getattr(config, f"bnb_4bit_{key}")
        if value != default:
            said = dump_value(f"bnb_4bit_{key}", value)
            fix = "remove it; qat_scheme: blockwise4:nf4:128:nested spells all three, or qat_scheme: fp4"
            yield f"bnb_4bit_{key}", f"{said} has no meaning with {chosen}", fix
    if config.recipe != "bf16":
        said = dump_value("recipe", config.recipe)
        yield "recipe", f"{chosen} with {said}: products with the rounded weights run in 16 bits", "set recipe: bf16"
    if config.lora_dropout and config.use_peft:
        said = dump_value("lora_dropout", config.lora_dropout)
        wrong = f"{chosen} with {said}: base and adapter are merged before rounding, and see the same input"
        yield "lora_dropout", wrong, "set lora_dropout: 0"
    if config.use_dora:
        wrong = f"{chosen} with use_dora: true: only plain LoRA is merged in every step"
        yield "use_dora", wrong, "set use_dora: false, or remove qat_scheme"
