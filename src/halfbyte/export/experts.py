"""Merging into stacked experts, expert by expert: which expert's rows a tensor of the checkpoint is, and its update.

A checkpoint has an expert's matrices apart where the model stacks them. What is merged is a tensor of the checkpoint:
so a stack never exists in 16 bits, but packed, where the base trained on was quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.formats import Format
from halfbyte.layers.expert_adapters import by_expert
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint that is some rows of one expert.

    Attributes:
        expert: whose.
        part: which of `parts` equal ones its rows are, in order: gate, then up.
    """

    expert: int
    part: int
    parts: int

    @classmethod
    def of(cls, key: str, pattern: str, sources: Sequence[str]) -> Piece | None:
        """Of the tensor `key`, which matched `pattern` among a converter's sources; None: it names no expert."""
        found = EXPERT.search(key)
        return cls(int(found[1]), list(sources).index(pattern), len(sources)) if found else None

    def rows(self, count: int) -> slice:
        """Its rows, of an expert's `count`."""
        each = count // self.parts
        return slice(self.part * each, (self.part + 1) * each)

    def shape(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tensor, by that of the stack [E, N, K]."""
        return (stack[1] // self.parts, stack[2])


@torch.no_grad()
def add_delta(wrapper: Any, weight: Tensor, piece: Piece | None) -> Tensor:
    """`weight` with what PEFT's adapter adds to it, in place, fp32: a stack as the model has it, or a piece of one."""
    a, b = by_expert(wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight, wrapper.num_experts)
    scaling = wrapper.scaling["default"]
    if piece is not None:
        rows = piece.rows(b.shape[1])
        return weight.addmm_(b[piece.expert, rows], a[piece.expert], alpha=scaling)
    transposed = wrapper.get_base_layer().is_transposed
    for at, matrix in enumerate(weight):
        (matrix.mT if transposed else matrix).add_(b[at] @ a[at], alpha=scaling)
    return weight


class PackedStacks:
    """The stacks of the base as it was trained on, quantized; one in memory at a time.

    Args:
        formats: stack → the format of its experts.
        read: stack → its matrices [N, K], in the dtype that they were cast to before they were quantized.
    """

    def __init__(self, formats: dict[str, Format], read: Callable[[str], Iterable[Tensor]]):
        self.formats, self._read = formats, read
        self._packed: tuple[str, QuantizedTensor] | None = None

    def expert(self, name: str, at: int, shape: tuple[int, ...]) -> Tensor:
        """fp32 [N, K]: expert `at` of a stack of `shape` [E, N, K], dequantized."""
        if self._packed is None or self._packed[0] != name:
            self._packed = None  # before the next is there
            try:
                self._packed = name, QuantizedTensor.quantize_stack(self._read(name), self.formats[name], shape)
            except ModelError as error:
                raise ModelError(f"{name}: {error.message}", error.fix) from error
        expert: Any = self._packed[1][at]
        return expert.dequantize(torch.float32)
