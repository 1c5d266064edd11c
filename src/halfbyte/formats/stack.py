"""Stacks: the experts of a layer in one tensor [E, N, K], with each matrix quantized separately.

Experts share no block, tile, codebook or scale, so each matrix is quantized as it is read and is a view of the stack.
`Format.stacked` gives the format of a stack: NF4 and FP4 use bitsandbytes' layout of a flat tensor, and the other
formats use their own parts with a leading dimension E (`Stack`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..utils.errors import ModelError
from .base import FORMATS, Format, Parts, PartSpecs, register_format
from .int4 import ENTRIES
from .mxfp4 import Mxfp4

META = "quant_state.halfbyte__stack"


def is_mxfp4(format_: Format | None) -> bool:
    """Whether `format_` stores stacks in MXFP4, as in gpt-oss."""
    return isinstance(format_, Stack) and isinstance(format_.each, Mxfp4)


@register_format
@dataclass(frozen=True)
class Stack(Format):
    """E matrices in one format, whose parts get a leading dimension E.

    Args:
        each: the format of one matrix.
    """

    each: Format

    name: ClassVar[str] = "stack"
    names: ClassVar[dict[str, str]] = {}

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.each.spec}"

    @classmethod
    def parse(cls, options: str) -> Stack:
        name, _, rest = options.partition(":")
        return cls(FORMATS[name].parse(rest))

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the contract test uses matrices. tests/formats/test_stack.py tests stacks."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        self.check_stack(shape)
        experts, *matrix = shape
        specs = self.each.part_specs(tuple(matrix))
        return {name: ((experts, *size), dtype) for name, (size, dtype) in specs.items()}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or math.prod(shape) == 0:
            message = f"a stack in {self.each.spec} cannot have the shape {tuple(shape)}"
            raise ModelError(message, "give all experts' matrices as one tensor [experts, rows, columns]")

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return self.quantize_stack(weight, tuple(weight.shape))

    def quantize_stack(self, weights: Iterable[Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        return self.stack_parts((self.each.quantize_expert(weight, at) for at, weight in enumerate(weights)), shape)

    def stack_parts(self, experts: Iterable[Parts], shape: tuple[int, ...]) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        for at, parts in enumerate(experts):
            if not stored:
                specs, device = self.part_specs(shape).items(), next(iter(parts.values())).device
                stored = {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in specs}
            for name, part in parts.items():
                stored[name][at] = part
        return stored

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count, rows, columns = shape
        whole = self.each.dequantize_stack(parts, (count, rows, columns), dtype)
        if whole is not None:
            return whole
        values = torch.empty(shape, dtype=dtype, device=next(iter(parts.values())).device)
        for at in range(shape[0]):
            values[at] = self.each.dequantize({name: part[at] for name, part in parts.items()}, shape[1:], dtype)
        return values

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        self.each.check_values(parts, labels)

    def expert(self, parts: Parts, shape: tuple[int, ...], index: int) -> tuple[Format, dict[str, Tensor]]:
        return self.each, {name: part[index] for name, part in parts.items()}

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        parts = (example.part_specs((2, 64)) for each in FORMATS.values() for example in each.examples())
        return frozenset({"", META, *ENTRIES, *(name for names in parts for name in names)})
