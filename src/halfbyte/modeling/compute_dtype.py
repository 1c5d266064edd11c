"""The dtype that a model's matmuls run in, with adapters in another dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


@contextlib.contextmanager
def no_input_casts(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Disable PEFT's input casts, during a 16-bit training or generation; `compute_autocast` does the casting.

    The context must include backward, since activation checkpointing reruns forwards there. In float32 there is no
    autocast, and PEFT's casts stay.
    """
    if (dtype or compute_dtype_of(model)) == torch.float32:
        yield
        return
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    switches = [getattr(layer, "cast_input_dtype_enabled", True) for layer in layers]  # not all of PEFT's layers set it
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer, switch in zip(layers, switches, strict=True):
            layer.cast_input_dtype_enabled = switch


@contextlib.contextmanager
def compute_autocast(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run one forward's matmuls in `dtype`, whatever the dtype of the trained weights.

    Args:
        dtype: default: the dtype of the frozen weights (`compute_dtype_of`). Autocast stays off for float32, and if
            all weights have this dtype already.
    """
    dtype, device = dtype or compute_dtype_of(model), next(model.parameters()).device
    # a sharded optimizer keeps fp32 masters of parameters in `dtype`; their gradients' dtype differs from `dtype`
    mixed = any(
        parameter.is_floating_point()
        and (parameter.dtype != dtype or (parameter.requires_grad and parameter.grad_dtype != dtype))
        for parameter in model.parameters()
    )
    with torch.autocast(device.type, dtype=dtype, enabled=mixed and dtype != torch.float32):
        yield


def compute_dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of activations: the frozen floating-point weights' dtype, or all weights' if none is frozen."""
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            return parameter.dtype
    return next(model.parameters()).dtype
