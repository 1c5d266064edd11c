"""LLM.int8() weights in the layout of bitsandbytes' Linear8bitLt: int8 codes and one scale per row.

`halfbyte.ops.int8` specifies the values. A module whose parameter `weight` has shape [..., K] and N rows in all has
the entries:

    weight         int8 [..., K]
    SCB            fp32 [N], the rows' absmax
    weight_format  uint8 [] = 0, row-major; missing in older checkpoints

The layout does not record the dtype of the values; they load as bfloat16. bitsandbytes rounds a weight to fp16 before
it computes codes and halfbyte does not: the bytes are equal for fp16 weights, and the values of other weights are at
least as close.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..ops.int8 import dequantize_rows_int8, linear_int8, quantize_rows_int8
from ..utils.errors import CheckpointError, ModelError
from .base import Format, Parts, PartSpecs, check_parts, cut, entry_name, register_format, split_parts

SUFFIXES = {"codes": "", "absmax": "../SCB"}
WEIGHT_FORMAT = "../weight_format"


@register_format
@dataclass(frozen=True)
class Int8(Format):
    """8-bit integers with one scale per row. It has no options."""

    name: ClassVar[str] = "int8"
    names: ClassVar[dict[str, str]] = {"int8": "int8"}

    @property
    def spec(self) -> str:
        return self.name

    @classmethod
    def parse(cls, options: str) -> Int8:
        if options:
            raise ModelError(f"int8 has no option {options!r}", "write int8")
        return cls()

    @classmethod
    def examples(cls) -> list[Format]:
        return [cls()]

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        rows = torch.Size(shape[:-1]).numel()
        return {"codes": (tuple(shape), torch.int8), "absmax": ((rows,), torch.float32)}

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        self.check_weight(weight)
        codes, absmax = quantize_rows_int8(weight.reshape(-1, weight.shape[-1]), None, 0.0)
        if not bool(torch.isfinite(absmax).all()):
            raise ModelError("the weight has NaN or Inf", "repair the checkpoint: a row with one would be lost")
        return {"codes": codes.view(weight.shape), "absmax": absmax}

    def rows_concatenate(self, rows: int) -> bool:
        return True

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        codes = parts["codes"].reshape(-1, shape[-1])
        return dequantize_rows_int8(codes, parts["absmax"], dtype).view(shape)

    def linear(self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        return linear_int8(x, parts["codes"], parts["absmax"], bias)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_rows_int8(parts["codes"][rows], parts["absmax"][rows], dtype)

    def _split(
        self, parts: Parts, shape: tuple[int, int], dim: int, n: int
    ) -> tuple[Format, list[dict[str, Tensor]]] | int:
        codes, absmax = {"codes": cut(parts["codes"], n, dim)}, parts["absmax"]
        if dim:
            return self, split_parts(n, codes, {"absmax": absmax})
        return self, split_parts(n, codes | {"absmax": cut(absmax, n, 0)}, {})

    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        state = {suffix: parts[part] for part, suffix in SUFFIXES.items()}
        return state | {WEIGHT_FORMAT: torch.zeros((), dtype=torch.uint8, device=parts["codes"].device)}

    @classmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Int8, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        parts = {part: state[suffix] for part, suffix in SUFFIXES.items() if suffix in state}
        shape = tuple(parts["codes"].shape) if "codes" in parts else ()
        rows, label = torch.Size(shape[:-1]).numel(), entry_name(name, SUFFIXES["absmax"])
        if "codes" in parts and "absmax" in parts and tuple(parts["absmax"].shape) != (rows,):
            found = tuple(parts["absmax"].shape)
            raise CheckpointError(
                f"{name} is {shape}, and its scales {label} are {found}", "re-download the checkpoint"
            )
        check_parts(parts, cls().part_specs(shape), SUFFIXES, name)
        _check_layout(state.get(WEIGHT_FORMAT), entry_name(name, WEIGHT_FORMAT))
        cls().check_values(parts, {"codes": name, "absmax": label})
        return cls(), parts, shape, torch.bfloat16

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        absmax = parts["absmax"]
        if not absmax.is_meta and not bool((absmax.isfinite() & (absmax >= 0)).all()):
            wrong = f"{labels['absmax']} has scales that are negative, NaN or Inf"
            raise CheckpointError(wrong, "re-download the checkpoint")

    @classmethod
    def from_quantization_config(cls, entry: Mapping[str, Any]) -> Int8 | None:
        if entry.get("quant_method", "bitsandbytes") != "bitsandbytes" or not entry.get("load_in_8bit"):
            return None
        return cls()


def _check_layout(layout: Tensor | None, label: str) -> None:
    """Raise a CheckpointError unless the layout is row-major (0); older bitsandbytes could save other orders."""
    if layout is None or layout.is_meta:
        return
    if layout.dtype != torch.uint8 or layout.numel() != 1 or layout.item():
        raise CheckpointError(f"{label} is not 0 (row-major)", "save the model again with bitsandbytes 0.45 or newer")
