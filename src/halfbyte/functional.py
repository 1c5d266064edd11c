"""4-bit quantization functions with the names and semantics of bitsandbytes.functional, and `linear_loss`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .autograd.linear_loss import linear_loss as linear_loss
from .formats import Blockwise4
from .formats.codebooks import codebook4
from .utils.errors import ModelError


@dataclass
class QuantState:
    """Scales and metadata that `dequantize_4bit` needs in addition to the packed bytes.

    Attributes:
        absmax: fp32 [blocks]; uint8 [blocks] when nested.
        shape, dtype: shape and dtype of the values.
        blocksize: values per scale.
        quant_type: "nf4" or "fp4".
        nested_absmax, nested_code, offset: second-level scales fp32 [⌈blocks/256⌉], their code fp32 [256] and the mean
            of the scales fp32 []; None unless nested.
    """

    absmax: Tensor
    shape: torch.Size
    dtype: torch.dtype
    blocksize: int
    quant_type: str
    nested_absmax: Tensor | None = None
    nested_code: Tensor | None = None
    offset: Tensor | None = None

    @property
    def nested(self) -> bool:
        return self.nested_absmax is not None

    @property
    def code(self) -> Tensor:
        """fp32 [16]: the codebook."""
        return codebook4(self.quant_type, self.absmax.device)

    @property
    def format(self) -> Blockwise4:
        return Blockwise4(self.quant_type, self.blocksize, self.nested)  # type: ignore[arg-type]

    def _parts(self, packed: Tensor) -> dict[str, Tensor]:
        nested = {"nested_absmax": self.nested_absmax, "nested_code": self.nested_code, "nested_offset": self.offset}
        return {"packed": packed, "absmax": self.absmax} | {k: v for k, v in nested.items() if v is not None}

    def as_dict(self, packed: Tensor) -> dict[str, Tensor]:
        """Checkpoint entries by suffix ("" is the packed weight), as bitsandbytes names them."""
        return self.format.to_state(self._parts(packed), tuple(self.shape), self.dtype)

    @classmethod
    def from_dict(cls, state: dict[str, Tensor], name: str = "weight") -> tuple[Tensor, QuantState]:
        """Packed bytes and state from checkpoint entries by suffix."""
        format_, tensors, shape, dtype = Blockwise4.from_state(state, name)
        return tensors["packed"], _state(format_, tensors, torch.Size(shape), dtype)


def _state(format_: Blockwise4, tensors: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> QuantState:
    nested: dict[str, Any] = {}
    if format_.nested:
        nested = {"nested_absmax": tensors["nested_absmax"], "nested_code": tensors["nested_code"]}
        nested["offset"] = tensors["nested_offset"]
    return QuantState(tensors["absmax"], shape, dtype, format_.blocksize, format_.quant_type, **nested)


def quantize_4bit(
    A: Tensor, blocksize: int = 64, compress_statistics: bool = False, quant_type: str = "nf4"
) -> tuple[Tensor, QuantState]:
    """Quantize a tensor in blocks of 4-bit values.

    Args:
        A: any shape; fp32, fp16 or bf16.
        blocksize: values per scale: 32, 64, ..., 4096.
        compress_statistics: quantize the scales to 8 bits too (double quantization).
        quant_type: "nf4" or "fp4".

    Returns:
        packed uint8 [(A.numel()+1)//2, 1] and its state.

    Raises:
        ModelError: an unsupported option or dtype, or NaN/Inf in `A`.
    """
    format_ = Blockwise4(quant_type, blocksize, compress_statistics)  # type: ignore[arg-type]
    tensors = format_.quantize(A)
    return tensors["packed"], _state(format_, tensors, A.shape, A.dtype)


def dequantize_4bit(packed: Tensor, quant_state: QuantState, *, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantize a result of `quantize_4bit` to `dtype` (default: the dtype of the quantized tensor).

    Raises:
        ModelError: `packed` does not have the number of bytes that `quant_state` describes.
    """
    if packed.numel() != (quant_state.shape.numel() + 1) // 2:
        raise ModelError(
            f"{packed.numel()} packed bytes do not hold a tensor of shape {tuple(quant_state.shape)}",
            "pass the state that quantize_4bit returned with these bytes",
        )
    return quant_state.format.values(quant_state._parts(packed), tuple(quant_state.shape), dtype or quant_state.dtype)
