"""QuantState: scales and metadata of a blockwise-quantized tensor, as bitsandbytes stores and serializes them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..autograd.linear import decode
from ..formats import Blockwise4, Format
from ..formats.blockwise4 import STATE_KEYS
from ..formats.codebooks import dequantize_blockwise8
from ..formats.int8 import Int8
from ..layers.bnb import blockwise4_parts, has_standard_nesting
from ..tensor import QuantizedTensor
from .utils import pack_dict_to_tensor, unpack_tensor_to_dict

_PACKED = "quant_state"


class QuantState:
    """State of `quantize_4bit` or `quantize_blockwise`.

    Args:
        absmax: fp32 [blocks]; uint8 [blocks] when nested.
        shape: shape of the values; None for 8-bit states.
        code: fp32 [16] or [256].
        blocksize: values per scale.
        quant_type: "nf4" or "fp4"; None for 8-bit states.
        dtype: dtype of the values.
        offset: fp32 [], mean of the scales, when nested.
        state2: state of the quantized scales, when nested.
    """

    valid_quant_types = ("fp4", "nf4")
    valid_qs_type_keys: ClassVar[list[str]] = [f"bitsandbytes__{quant_type}" for quant_type in ("fp4", "nf4")]
    valid_qs_keys: ClassVar[list[str]] = [
        "absmax", "quant_map", "nested_absmax", "nested_quant_map", "quant_state", "quant_type", "blocksize", "dtype",
        "shape", "nested_blocksize", "nested_dtype", "nested_offset",
    ]  # fmt: skip

    def __init__(
        self,
        absmax: Tensor,
        shape: Any = None,
        code: Tensor | None = None,
        blocksize: int | None = None,
        quant_type: str | None = None,
        dtype: torch.dtype | None = None,
        offset: Tensor | None = None,
        state2: QuantState | None = None,
    ):
        self.absmax = absmax
        self.shape = shape
        self.code: Any = code
        self.dtype: Any = dtype
        self.blocksize: Any = blocksize
        self.quant_type = quant_type
        self.offset: Any = offset
        self.state2: Any = state2
        self.nested = state2 is not None

    def __getattr__(self, name: str) -> Any:
        # FSDP reads the dotted key "quant_state.bitsandbytes__nf4" of a state dict attribute by attribute.
        if name.startswith("bitsandbytes__"):
            packed = self.as_dict(packed=True)
            if f"{_PACKED}.{name}" in packed:
                return packed[f"{_PACKED}.{name}"]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: int) -> Any:
        """Return field `index` of [absmax, shape, dtype, blocksize, [offset, state2] or None, quant_type]."""
        nested = [self.offset, self.state2] if self.nested else None
        return [self.absmax, self.shape, self.dtype, self.blocksize, nested, self.quant_type][index]

    @classmethod
    def from_dict(cls, qs_dict: dict[str, Any], device: torch.device | str) -> QuantState:
        """Build a state on `device` from the result of `as_dict`, whose keys may have a prefix ending in a dot.

        Raises:
            ValueError: no state, or more than one packed state, is found.
        """
        keys = [key for key, value in qs_dict.items() if _PACKED in key and isinstance(value, Tensor)]
        if not keys and "quant_type" not in qs_dict:
            raise ValueError(
                "found neither packed nor unpacked quant_state items: pass the result of QuantState.as_dict"
            )
        if keys and (len(keys) > 1 or keys[0].rpartition(".")[2] not in cls.valid_qs_type_keys):
            raise ValueError(f"found {keys}: expected one quant_state item ending in one of {cls.valid_qs_type_keys}")
        fields = {key.rpartition(".")[2]: value for key, value in qs_dict.items() if key not in keys}
        if keys:
            fields |= unpack_tensor_to_dict(qs_dict[keys[0]])
        unknown = fields.keys() - set(cls.valid_qs_keys)
        if unknown:
            raise ValueError(f"{sorted(unknown)} are not fields of a quantization state")
        offset = state2 = None
        if "nested_absmax" in fields:
            offset = torch.tensor(float(fields["nested_offset"]), device=device)
            state2 = cls(
                absmax=fields["nested_absmax"].to(device),
                blocksize=fields["nested_blocksize"],
                code=fields["nested_quant_map"].to(device),
                dtype=getattr(torch, fields["nested_dtype"]),
            )
        return cls(
            quant_type=fields["quant_type"],
            absmax=fields["absmax"].to(device),
            blocksize=fields["blocksize"],
            code=fields["quant_map"].to(device),
            dtype=getattr(torch, fields["dtype"]),
            shape=torch.Size(fields["shape"]) if fields["shape"] is not None else None,
            offset=offset,
            state2=state2,
        )

    def as_dict(self, packed: bool = False) -> dict[str, Any]:
        """Return the state as a dict; with `packed`, all values are tensors (a checkpoint's entries).

        8-bit states have no packed form and are returned unpacked.
        """
        state = {
            "quant_type": self.quant_type,
            "absmax": self.absmax,
            "blocksize": self.blocksize,
            "quant_map": self.code,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": tuple(self.shape) if self.shape is not None else None,
        }
        if self.nested:
            state |= {
                "nested_absmax": self.state2.absmax,
                "nested_blocksize": self.state2.blocksize,
                "nested_quant_map": self.state2.code.clone(),  # safetensors refuses entries that share memory
                "nested_dtype": str(self.state2.dtype).removeprefix("torch."),
                "nested_offset": self.offset.item(),
            }
        if not packed or self.quant_type not in STATE_KEYS:
            return state
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        return tensors | {STATE_KEYS[self.quant_type]: pack_dict_to_tensor(numbers)}

    def to(self, device: torch.device | str) -> None:
        """Move the state's tensors to `device`, in place."""
        self.code = self.code.to(device)
        self.absmax = self.absmax.to(device)
        if self.nested:
            self.offset = self.offset.to(device)
            self.state2.absmax = self.state2.absmax.to(device)
            self.state2.code = self.state2.code.to(device)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantState):
            return False
        attributes, other_attributes = vars(self), vars(other)
        return attributes.keys() == other_attributes.keys() and all(
            _equal(value, other_attributes[key]) for key, value in attributes.items()
        )

    __hash__ = None  # type: ignore[assignment]

    def scales(self) -> Tensor:
        """fp32 [blocks]: the scales, dequantized when nested."""
        if not self.nested:
            return self.absmax
        second = self.state2
        values = dequantize_blockwise8(self.absmax, second.absmax, second.code, second.blocksize, torch.float32)
        return values + self.offset

    def as_format(self, packed: Tensor) -> tuple[Blockwise4, dict[str, Tensor]]:
        """Return the storage format and its parts for the `packed` bytes (of any storage dtype), without a copy.

        Scales that are nested in blocks of other than 256 are dequantized.
        """
        state = self
        if not has_standard_nesting(self):
            state = QuantState(self.scales(), self.shape, self.code, self.blocksize, self.quant_type, self.dtype)
        return blockwise4_parts(packed, state)

    def as_tensor(self, packed: Tensor) -> QuantizedTensor:
        """Return the 4-bit weight as a `QuantizedTensor` that shares its memory."""
        format_, tensors = self.as_format(packed.detach())
        return QuantizedTensor(format_, tensors, tuple(self.shape), self.dtype)


class StoredWeight:
    """A frozen weight in parts, with the attributes of a `QuantizedTensor` that halfbyte's linears read.

    Args:
        format, parts: storage format and its parts.
        shape, dtype: shape and default dtype of the values.
    """

    format: Format
    requires_grad = False

    def __init__(self, format: Format, tensors: dict[str, Tensor], shape: Any, dtype: torch.dtype):
        self.format, self.parts = format, tensors
        self.shape, self.dtype = torch.Size(shape), dtype
        self.device = next(iter(tensors.values())).device

    @classmethod
    def packed(cls, packed: Tensor, state: QuantState) -> StoredWeight:
        """Return a packed 4-bit weight [N, K], of any storage dtype and orientation."""
        return cls(*state.as_format(packed), state.shape, state.dtype)

    @classmethod
    def int8(cls, codes: Tensor, absmax: Tensor, dtype: torch.dtype) -> StoredWeight:
        """Return an int8 weight [N, K] with scales [N]."""
        return cls(Int8(), {"codes": codes, "absmax": absmax}, codes.shape, dtype)

    def detach(self) -> Any:
        """Return the weight, which has no gradient."""
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values [N, K] in `dtype` (default: the weight's own)."""
        return decode(self.format, self.parts, tuple(self.shape), dtype or self.dtype)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
