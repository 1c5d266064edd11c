"""Drop-in modules whose frozen weights are quantized."""

from .quantized import (
    Embedding4bit,
    Linear4bit,
    LinearFP4,
    LinearNF4,
    QuantizedLinear,
    QuantizedWeight,
    hold_stacks,
    hold_table,
    quantized_parameter,
)

__all__ = [
    "Embedding4bit",
    "Linear4bit",
    "LinearFP4",
    "LinearNF4",
    "QuantizedLinear",
    "QuantizedWeight",
    "hold_stacks",
    "hold_table",
    "quantized_parameter",
]
