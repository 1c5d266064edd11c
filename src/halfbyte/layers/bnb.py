"""Frozen linears of bitsandbytes, and PEFT's LoRA around them, read without a copy.

The layers of the real package and those of `halfbyte.bitsandbytes` have the same attributes. A layer is recognized by
the module and name of its forward, so that this module imports neither package, and a subclass with a forward of its
own is not taken for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..dispatch import on_compiler
from ..formats import Blockwise4, Int8
from ..formats.blockwise4 import BLOCKSIZES, STATE_KEYS
from ..ops.blockwise4 import NESTED_BLOCK
from ..tensor import QuantizedTensor

MODULES = ("bitsandbytes.nn.modules", "halfbyte.bitsandbytes.nn.modules")
LORA_MODULE = "peft.tuners.lora.bnb"

Key = tuple[Any, ...]  # addresses of the stored tensors, and their format
Source = tuple[Key, Callable[[], QuantizedTensor]]

# The last view of each layer: building one takes 40 µs, and training reads each layer two or three times a step.
_views: WeakKeyDictionary[nn.Module, tuple[Key, QuantizedTensor]] = WeakKeyDictionary()


def is_bnb_linear(module: nn.Module) -> bool:
    """Return whether a module runs the forward of bitsandbytes' `Linear4bit` or `Linear8bitLt`."""
    return _reader(module) is not None


def is_bnb_lora(module: nn.Module) -> bool:
    """Return whether a module runs the forward of PEFT's LoRA around a linear of bitsandbytes.

    The forward is x·Wᵀ + b plus the adapters' terms, as that of `peft.tuners.lora.Linear`.
    """
    place, name = _forward(module)
    return place == LORA_MODULE and name in ("Linear4bit.forward", "Linear8bitLt.forward")


def weight_view(linear: nn.Linear) -> QuantizedTensor | str:
    """Return the weight of a linear of bitsandbytes as a `QuantizedTensor` that shares its memory, or why not.

    Args:
        linear: a module for which `is_bnb_linear` is True.

    Returns:
        [N, K] in format NF4, FP4 or int8; or the reason why halfbyte's kernels cannot read this weight.
    """
    if on_compiler():  # a graph cannot hold the views
        return "torch.compile traces the forward of a bitsandbytes linear"
    read = _reader(linear)
    assert read is not None
    found = read(linear)
    if isinstance(found, str):
        return found
    key, build = found
    held = _views.get(linear)
    if held is None or held[0] != key:
        held = _views[linear] = key, build()
    return held[1]


def forget_view(module: nn.Module) -> None:
    """Drop the view of `weight_view`, which keeps the memory of its weight allocated."""
    _views.pop(module, None)


def blockwise4_parts(packed: Tensor, state: Any) -> tuple[Blockwise4, dict[str, Tensor]]:
    """Return the format and the parts of a packed 4-bit weight, without a copy.

    Args:
        packed: codes in any shape and storage dtype.
        state: a `QuantState` of either package with scales that are fp32, or nested in blocks of 256.
    """
    parts = {"packed": packed.reshape(-1).view(torch.uint8).view(-1, 1), "absmax": state.absmax}
    if state.nested:
        second = state.state2
        parts |= {"nested_absmax": second.absmax, "nested_code": second.code, "nested_offset": state.offset}
    return Blockwise4(state.quant_type, state.blocksize, state.nested), parts


def has_standard_nesting(state: Any) -> bool:
    """Return whether the scales of a 4-bit state are fp32, or nested as halfbyte's kernels read them."""
    return not state.nested or (state.state2.blocksize == NESTED_BLOCK and state.state2.code.numel() == 256)


def _read_4bit(linear: Any) -> Source | str:
    weight = linear.weight
    state = getattr(weight, "quant_state", None)
    if state is None:  # FSDP drops attributes of parameters; the layer has the state too
        state = getattr(linear, "quant_state", None)
    if state is None:
        return "its 4-bit weight is not quantized yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has reordered its codes for this CPU"
    if state.quant_type not in STATE_KEYS or state.blocksize not in BLOCKSIZES:
        return f"its weight is stored as {state.quant_type} in blocks of {state.blocksize}"
    if not has_standard_nesting(state):
        return f"its scales are nested in blocks of {state.state2.blocksize}, not {NESTED_BLOCK}"
    shape = linear.out_features, linear.in_features
    if state.shape is None or tuple(state.shape) != shape:
        return "the shape of its quantization state is not [out_features, in_features]"
    if weight.numel() * weight.itemsize != (shape[0] * shape[1] + 1) // 2:
        return "it holds a part of its weight only"
    scales = (state.absmax, state.state2.absmax, state.state2.code, state.offset) if state.nested else (state.absmax,)
    key = weight.data_ptr(), state.quant_type, state.blocksize, *map(id, scales)  # the view holds these tensors

    def build() -> QuantizedTensor:
        return QuantizedTensor(*blockwise4_parts(weight.detach(), state), shape, state.dtype)

    return key, build


def _read_8bit(linear: Any) -> Source | str:
    weight, scales = linear.weight, getattr(linear.weight, "SCB", None)
    if scales is None:  # the first forward moves them from the weight to the state
        scales = linear.state.SCB
    if linear.state.has_fp16_weights or weight.dtype != torch.int8 or scales is None:
        return "its 8-bit weight is not quantized yet"
    if tuple(weight.shape) != (linear.out_features, linear.in_features):
        return "it holds a part of its weight only"

    def build() -> QuantizedTensor:
        parts = {"codes": weight.detach(), "absmax": scales}
        return QuantizedTensor(Int8(), parts, tuple(weight.shape), torch.bfloat16)

    return (weight.data_ptr(), id(scales)), build


_READERS: dict[tuple[str, str], Callable[[Any], Source | str]] = {
    (module, f"{name}.forward"): read
    for module in MODULES
    for name, read in (("Linear4bit", _read_4bit), ("Linear8bitLt", _read_8bit))
}


def _reader(module: nn.Module) -> Callable[[Any], Source | str] | None:
    return _READERS.get(_forward(module))


def _forward(module: nn.Module) -> tuple[str, str]:
    """Return where the forward of a module's class is defined, and its qualified name."""
    forward = type(module).forward
    return getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
