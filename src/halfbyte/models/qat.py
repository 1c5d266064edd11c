"""Quantization-aware training of a loaded model: which linear layers compute with rounded weights, and to what."""

from __future__ import annotations

from typing import Any

from ..errors import ModelError
from ..formats import Format, named, names
from ..layers_qat import QATLinear
from ..notices import notice
from .quantizer import quantizable


def qat_format(scheme: str) -> Format:
    """The format that `qat_scheme` names; the same name in `halfbyte merge --quantize` stores it.

    Raises:
        ModelError: there is no such format, or it cannot be quantized to.
    """
    try:
        format_ = named(scheme)
    except ModelError as error:
        raise ModelError(f"qat_scheme: {error.message}", error.fix) from error
    if not type(format_).examples():
        raise ModelError(
            f"qat_scheme: {scheme} is only read from checkpoints", f"use one of {', '.join(sorted(names()))}"
        )
    return format_


def fake_quantize_linears(model: Any, format: Format) -> None:
    """Replace the linear layers that quantizing would store in `format` (not the head) by `QATLinear`, in place.

    Raises:
        ModelError: the model has none, or a weight has NaN or Inf, or a shape that the format cannot hold.
    """
    linears = quantizable(model)
    if not linears:
        raise ModelError(f"qat_scheme: {type(model).__name__} has no linear layer to quantize", "remove qat_scheme")
    for name, linear in linears.items():
        try:
            format.quantize(linear.weight.detach())  # the first forward would not know the name
        except ModelError as error:
            raise ModelError(f"qat_scheme: {name}.weight: {error.message}", error.fix) from error
        model.set_submodule(name, QATLinear.from_linear(linear, format))
    notice(
        f"qat-{format.spec}",
        f"quantization-aware: {len(linears)} linear layers compute with weights rounded to {format.spec} in every"
        " forward; activations, embeddings and the head are not rounded",
    )
