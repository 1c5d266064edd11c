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
from ..formats.blockwise4 import BLOCKSIZES, NESTED_BLOCK, STATE_KEYS
from ..tensor import QuantizedTensor

MODULES = ("bitsandbytes.nn.modules", "halfbyte.bitsandbytes.nn.modules")
LORA_MODULE = "peft.tuners.lora.bnb"

Key = tuple[Any, ...]  # addresses of the stored tensors, and their format

# The last view of each layer. Building one takes 40 µs and finding it 5 µs (one shared CPU core, 27 November 2026), and
# training reads each layer two or three times a step.
_views: WeakKeyDictionary[nn.Module, tuple[Key, QuantizedTensor]] = WeakKeyDictionary()


def is_bnb_linear(module: nn.Module) -> bool:
    """Return whether a module runs the forward of bitsandbytes' `Linear4bit` or `Linear8bitLt`."""
    return _reader(module) is not None


def is_bnb_lora(module: nn.Module) -> bool:
    """Return whether a module runs the forward of PEFT's LoRA around a linear of bitsandbytes.

    The forward is x·Wᵀ + b plus the adapters' terms, as that of `peft.tuners.lora.Linear`.
    """
    module_name, name = _forward(module)
    return module_name == LORA_MODULE and name in ("Linear4bit.forward", "Linear8bitLt.forward")


def weight_view(linear: nn.Linear) -> QuantizedTensor | str:
    """Return the weight of a linear of bitsandbytes as a `QuantizedTensor` that shares its memory, or why not.

    Args:
        linear: a module for which `is_bnb_linear` is True.

    Returns:
        [N, K] in format NF4, FP4 or int8; or the reason why halfbyte's kernels cannot read this weight.
    """
    reader = _reader(linear)
    assert reader is not None
    find_key, build = reader
    key, held = find_key(linear), _views.get(linear)
    if held is not None and held[0] == key:
        return held[1]
    view = build(linear)
    if not isinstance(view, str):
        _views[linear] = key, view
    return view


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


def _weight(linear: nn.Module) -> Any:
    """Return the weight; FSDP sets a plain tensor in the place of a parameter."""
    weight = linear._parameters.get("weight")
    return linear.weight if weight is None else weight


def _weight_address(weight: Tensor) -> Key:
    """Return address, size and dtype of a weight; `__torch_function__` of its class would take 5 µs for each."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.data_ptr(), weight.numel(), weight.dtype


def _state_4bit(linear: Any) -> Any:
    """Return the quantization state of a 4-bit layer's weight. FSDP drops its attribute; the layer has it too."""
    state = getattr(_weight(linear), "quant_state", None)
    return getattr(linear, "quant_state", None) if state is None else state


def _key_4bit(linear: Any) -> Key:
    """Return a key that changes with the view of a 4-bit layer. The view holds the tensors whose `id` is in the key."""
    state = _state_4bit(linear)
    if state is None:
        return ()
    second, packing = state.state2 if state.nested else None, vars(state).get("packing_format_for_cpu")
    nested = () if second is None else (id(second.absmax), id(second.code), id(state.offset), second.blocksize)
    address = _weight_address(_weight(linear))
    return *address, id(state.absmax), state.quant_type, state.blocksize, state.shape, packing, *nested


def _view_4bit(linear: Any) -> QuantizedTensor | str:
    weight, state = _weight(linear), _state_4bit(linear)
    shape = linear.out_features, linear.in_features
    if state is None:
        return "its 4-bit weight is not quantized yet"
    if getattr(state, "packing_format_for_cpu", False):
        return "bitsandbytes has reordered its codes for this CPU"
    if state.quant_type not in STATE_KEYS or state.blocksize not in BLOCKSIZES:
        return f"its weight is stored as {state.quant_type} in blocks of {state.blocksize}"
    if not has_standard_nesting(state):
        return f"its scales are nested in blocks of {state.state2.blocksize}, not {NESTED_BLOCK}"
    if state.shape is None or tuple(state.shape) != shape:
        return "the shape of its quantization state is not [out_features, in_features]"
    if weight.numel() * weight.itemsize != (shape[0] * shape[1] + 1) // 2:
        return "it holds a part of its weight only"
    return QuantizedTensor(*blockwise4_parts(weight.detach(), state), shape, state.dtype)


def _scales_8bit(linear: Any) -> Tensor | None:
    """Return the scales of an 8-bit layer, which its first forward moves from the weight to the state."""
    scales = getattr(_weight(linear), "SCB", None)
    return linear.state.SCB if scales is None else scales


def _key_8bit(linear: Any) -> Key:
    """Return a key that changes with the view of an 8-bit layer."""
    return *_weight_address(_weight(linear)), id(_scales_8bit(linear)), linear.state.has_fp16_weights


def _view_8bit(linear: Any) -> QuantizedTensor | str:
    weight, scales = _weight(linear), _scales_8bit(linear)
    shape = linear.out_features, linear.in_features
    if linear.state.has_fp16_weights or weight.dtype != torch.int8 or scales is None:
        return "its 8-bit weight is not quantized yet"
    if tuple(weight.shape) != shape:
        return "it holds a part of its weight only"
    return QuantizedTensor(Int8(), {"codes": weight.detach(), "absmax": scales}, shape, torch.bfloat16)


Reader = tuple[Callable[[Any], Key], Callable[[Any], QuantizedTensor | str]]
_READERS: dict[tuple[str, str], Reader] = {
    (module, f"{name}.forward"): reader
    for module in MODULES
    for name, reader in (("Linear4bit", (_key_4bit, _view_4bit)), ("Linear8bitLt", (_key_8bit, _view_8bit)))
}


def _reader(module: nn.Module) -> Reader | None:
    return _READERS.get(_forward(module))


def _forward(module: nn.Module) -> tuple[str, str]:
    """Return where the forward of a module's class is defined, and its qualified name.

    Both are empty under torch.compile, where bitsandbytes' linears run their own forward: a graph cannot hold a view.
    """
    if on_compiler():
        return "", ""
    forward = type(module).forward
    return getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
