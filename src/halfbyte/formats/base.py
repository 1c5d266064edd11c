"""What a stored format is: named parts, and two functions between parts and values.

A format is a frozen dataclass of its options. It lists its parts once (`part_specs`); the tensor subclass, saving,
loading, sharding and compiling derive everything from that list.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ModelError

Parts = Mapping[str, Tensor]
PartSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Format(abc.ABC):
    """A way to store a floating-point tensor in fewer bits. Subclasses are frozen dataclasses of their options."""

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def spec(self) -> str:
        """Name and options as one string, read back by `formats.from_spec`; what torch.compile knows a format by."""

    @classmethod
    @abc.abstractmethod
    def parse(cls, options: str) -> Format:
        """The format from its `spec` after the name."""

    @classmethod
    @abc.abstractmethod
    def examples(cls) -> list[Format]:
        """A few option sets that together reach every path of the format; the contract test runs each of them."""

    @abc.abstractmethod
    def part_specs(self, shape: tuple[int, ...]) -> PartSpecs:
        """Name, shape and dtype of each part that stores a tensor of `shape`, in a fixed order."""

    @abc.abstractmethod
    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Parts of `weight` (any shape; fp32, fp16 or bf16), on its device.

        Raises:
            ModelError: the weight has NaN or Inf, or a dtype the format does not take.
        """

    @abc.abstractmethod
    def dequantize(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Values of `shape` in `dtype`, rounded once from fp32."""

    def linear(self, x: Tensor, parts: Parts, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        """[M, N] = x·Wᵀ + b for x [M, K], no gradient. Formats override it where few rows need no dequantized copy."""
        return F.linear(x, self.dequantize(parts, shape, x.dtype), bias)

    def dequantize_rows(self, parts: Parts, shape: tuple[int, ...], rows: Tensor, dtype: torch.dtype) -> Tensor:
        """`dtype` [rows, width]: chosen rows of a two-dimensional table. Formats override it to decode only those."""
        return self.dequantize(parts, shape, dtype)[rows]

    @abc.abstractmethod
    def to_state(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
        """Checkpoint entries: suffix after the parameter's name ("" for the codes themselves) → tensor."""

    @classmethod
    @abc.abstractmethod
    def from_state(cls, state: Parts, name: str) -> tuple[Format, dict[str, Tensor], tuple[int, ...], torch.dtype]:
        """The reverse of `to_state`: format, parts, shape and dtype.

        Raises:
            CheckpointError: an entry of parameter `name` is missing, misshapen or contradicts another.
        """

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Stored bits over weights, scales included."""
        bytes_ = sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in self.part_specs(shape).values())
        return 8 * bytes_ / max(torch.Size(shape).numel(), 1)

    def check_weight(self, weight: Tensor) -> None:
        if weight.dtype not in FLOATS:
            raise ModelError(
                f"cannot quantize a {weight.dtype} tensor to {self.name}", "convert it to a 16- or 32-bit float"
            )


FORMATS: dict[str, type[Format]] = {}


def register_format(cls: type[Format]) -> type[Format]:
    """Make a format known by each of its names, for `from_spec` and for the contract test."""
    FORMATS[cls.name] = cls
    return cls
