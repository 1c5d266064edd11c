"""A GGUF file: its keys and its tensors, mapped from disk, and values decoded a few rows at a time."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..reading.gguf import DAMAGED, Described, read_head
from ..utils.errors import CheckpointError, ModelError
from .keys import check_hyperparameter, check_keys

VALUES = 1 << 24  # decoded at once, in fp32: 64 MiB
STORED = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
NUMPY = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        shape: rows first.
        data: mapped, not read: [..., columns] of fp32 or fp16, or uint8 [..., bytes of a row].
    """

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open file.

    Attributes:
        path: where it lies.
        arch: llama.cpp's name of the architecture.
        tensors: by their names.

    Raises:
        ModelError: one part of a split file.
        CheckpointError: no GGUF file, a truncated one, a key of another type than it should have, or a tensor of a type
            that cannot be decoded.
    """

    def __init__(self, path: Path):
        self.path = path
        head = read_head(path)
        self._keys = head.keys
        check_keys(path, head.keys)
        self.arch: str = self.get("general.architecture", "")
        if self.get("split.count", 1) > 1:
            raise ModelError(f"{path} is one of {self.get('split.count')} parts", "join them: llama-gguf-split --merge")
        mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        self.tensors = {each.name: self._tensor(each, mapped) for each in head.tensors}

    def _tensor(self, described: Described, mapped: np.ndarray) -> GgufTensor:
        """Its data, looked for within the file."""
        name, shape = described.name, described.shape
        try:
            kind = GGMLQuantizationType(described.type)
        except ValueError as error:
            raise self._undecoded(name, f"a type with the number {described.type}") from error
        if not _is_decoded(kind):
            raise self._undecoded(name, kind.name)
        block, nbytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{self.path}: {name} has shape {shape}, which {kind.name} does not have", DAMAGED)
        size = math.prod(shape) // block * nbytes
        if described.start + size > len(mapped):
            raise CheckpointError(
                f"{self.path} is truncated: {name} of shape {shape} ends at byte {described.start + size}, and the file"
                f" has {len(mapped)}",
                DAMAGED,
            )
        data = mapped[described.start : described.start + size]
        return GgufTensor(kind, shape, data.view(NUMPY.get(kind, np.uint8)).reshape(*shape[:-1], -1))

    def _undecoded(self, name: str, kind: str) -> CheckpointError:
        message = f"{self.path}: {name} is stored as {kind}, which the gguf library cannot decode"
        return CheckpointError(message, "use a file of another type, e.g. Q8_0")

    @property
    def keys(self) -> list[str]:
        """Names of all metadata."""
        return list(self._keys)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key as plain Python; an fp32 number as the shortest decimal that is rounded to it."""
        value = self._keys.get(key, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def of_arch(self, key: str, default: Any = None) -> Any:
        """The value of a hyperparameter, e.g. "block_count".

        Raises:
            CheckpointError: the file has none, and there is no default; or it has one that cannot be.
        """
        value = self.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the key {self.arch}.{key}", DAMAGED)
        check_hyperparameter(self.path, f"{self.arch}.{key}", value)
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor's values, rows first.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}", DAMAGED)
        return self.tensors[name].shape

    def values(self, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """A tensor, or one expert's part of a stack, decoded and rounded once to `dtype`, on the CPU."""
        shape = self.shape(name) if expert is None else self.shape(name)[1:]
        out = torch.empty(shape, dtype=dtype)
        rows = out.view(-1, shape[-1])
        first = 0 if expert is None else expert * len(rows)
        step = max(1, VALUES // shape[-1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            part.copy_(_decode(self.tensors[name], slice(first + start, first + start + len(part))))
        return out

    def blocks(self, name: str) -> Tensor:
        """uint8 [rows, blocks, bytes of a block]: a quantized tensor as it is stored, a copy on the CPU."""
        tensor = self.tensors[name]
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        return torch.from_numpy(np.array(rows)).view(len(rows), -1, GGML_QUANT_SIZES[tensor.tensor_type][1])


@functools.cache
def _is_decoded(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf library decodes a type: tried on one block of zeros."""
    try:
        gguf.quants.dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _decode(tensor: GgufTensor, rows: slice) -> Tensor:
    """Rows of a tensor seen as a matrix, as the gguf library decodes them: fp32 or fp16."""
    stored = tensor.data.reshape(-1, tensor.data.shape[-1])[rows]
    if tensor.tensor_type in STORED:
        return torch.from_numpy(np.array(stored))
    return torch.from_numpy(gguf.quants.dequantize(np.ascontiguousarray(stored), tensor.tensor_type))
