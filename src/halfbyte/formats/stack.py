"""Stacks: the experts of a layer in one tensor [E, N, K], each matrix quantized by itself.

No block, tile, codebook or scale is shared by two experts, so each is quantized as it is read, and each is a view of
the whole. A format stores its stacks as `Format.stacked` says: NF4 and FP4 as bitsandbytes stores the whole tensor,
the others as their own parts with a leading dimension E.
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
    """Whether it is that of stacks in MXFP4, as gpt-oss has them."""
    return isinstance(format_, Stack) and isinstance(format_.each, Mxfp4)


@register_format
@dataclass(frozen=True)
class Stack(Format):
    """E matrices in one format: its parts, with a leading dimension E.

    Args:
        each: the format of one.
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
        """None: the contract begins with matrices, and a stack has three dimensions (tests/formats/test_stack.py)."""
        return []

    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        self.check_stack(shape)
        experts, *matrix = shape
        specs = self.each.part_specs(tuple(matrix))
        return {name: ((experts, *size), dtype) for name, (size, dtype) in specs.items()}

    def check_stack(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 3 or math.prod(shape) == 0:
            said = f"a stack in {self.each.spec} has experts, rows and columns, not the shape {tuple(shape)}"
            raise ModelError(said, "give all experts' matrices as one tensor [experts, rows, columns]")

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        return self.join(weight, tuple(weight.shape))

    def join(self, weights: Iterable[Tensor], shape: tuple[int, ...]) -> dict[str, Tensor]:
        return self.fill((self.each.quantize_expert(weight, at) for at, weight in enumerate(weights)), shape)

    def fill(self, experts: Iterable[Parts], shape: tuple[int, ...]) -> dict[str, Tensor]:
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
