"""Stacks: the experts of a layer in one tensor [E, N, K], with each matrix quantized separately.

Experts share no block, tile, codebook or scale, so each matrix is quantized as it is read and is a view of the stack.
`Format.stacked` gives the format of a stack: NF4 and FP4 use bitsandbytes' layout of a flat tensor, and the other
formats use their own parts with a leading dimension E (`Stack`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..utils.errors import ModelError
from .base import FORMATS, META_KEY, Format, Parts, PartSpecs, register_format

STACK_META = META_KEY + "stack"


@register_format
@dataclass(frozen=True)
class Stack(Format):
    """E matrices in one format, whose parts get a leading dimension E.

    Args:
        matrix_format: the format of one matrix.
    """

    matrix_format: Format

    name: ClassVar[str] = "stack"
    names: ClassVar[dict[str, str]] = {}

    @property
    def spec(self) -> str:
        return f"{self.name}:{self.matrix_format.spec}"

    @classmethod
    def parse(cls, options: str) -> Stack:
        name, _, matrix_options = options.partition(":")
        return cls(FORMATS[name].parse(matrix_options))

    @classmethod
    def examples(cls) -> list[Format]:
        """No examples: the contract test uses matrices. tests/formats/test_stack.py tests stacks."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        self.check_stack(shape)
        experts, *matrix = shape
        specs = self.matrix_format.part_specs(tuple(matrix))
        return {name: ((experts, *size), dtype) for name, (size, dtype) in specs.items()}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or math.prod(shape) == 0:
            message = f"a stack in {self.matrix_format.spec} cannot have the shape {tuple(shape)}"
            raise ModelError(message, "give all experts' matrices as one tensor [experts, rows, columns]")

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return self.quantize_stack(weight, tuple(weight.shape))

    def quantize_expert(self, weight: Tensor, index: int) -> dict[str, Tensor]:
        return self.matrix_format.quantize_expert(weight, index)

    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count, rows, columns = shape
        values = self.matrix_format.dequantize_stack(parts, (count, rows, columns), dtype)
        if values is not None:
            return values
        values = torch.empty(shape, dtype=dtype, device=next(iter(parts.values())).device)
        for index in range(count):
            _, matrix = self.expert(parts, shape, index)
            values[index] = self.matrix_format.dequantize(matrix, shape[1:], dtype)
        return values

    def check_values(self, parts: Parts, labels: Mapping[str, str]) -> None:
        self.matrix_format.check_values(parts, labels)

    def expert(self, parts: Parts, shape: tuple[int, ...], index: int) -> tuple[Format, dict[str, Tensor]]:
        return self.matrix_format, {name: tensor[index] for name, tensor in parts.items()}

    @classmethod
    @functools.cache
    def state_suffixes(cls) -> frozenset[str]:
        specs = (example.part_specs((2, 64)) for format_ in FORMATS.values() for example in format_.examples())
        read_only = (name for format_ in FORMATS.values() for name in format_.parts_of_checkpoints)
        return frozenset({"", STACK_META, *read_only, *(name for names in specs for name in names)})
