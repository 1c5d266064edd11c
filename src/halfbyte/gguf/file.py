"""A GGUF file: its keys and its tensors, mapped from disk, and values decoded a few rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..errors import CheckpointError, ModelError

VALUES = 1 << 24  # decoded at once, in fp32: 64 MiB
STORED = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
DAMAGED = "download or convert the file again"


class _Reader(gguf.GGUFReader):
    """The gguf library's reader, on a plain view of the mapped file: slices of a memmap, of which a vocabulary takes
    hundreds of thousands, cost several times as much."""

    def _get(self, *args: Any, **kwargs: Any) -> Any:
        self.data: Any = np.asarray(self.data)
        return super()._get(*args, **kwargs)


class GgufFile:
    """An open file.

    Attributes:
        path: where it lies.
        arch: llama.cpp's name of the architecture.
        tensors: name → the gguf library's description; `data` is mapped, not read.

    Raises:
        ModelError: one part of a split file.
        CheckpointError: no GGUF file, a truncated one, or a tensor of a type that cannot be decoded.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
            raise CheckpointError(f"{path} is truncated, or no GGUF file: {error}", DAMAGED) from error
        self.arch = str(self.get("general.architecture", ""))
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.get("split.count", 1) > 1:
            raise ModelError(f"{path} is one of {self.get('split.count')} parts", "join them: llama-gguf-split --merge")
        for name, tensor in self.tensors.items():
            try:
                self._decoded(name, slice(0, 1))
            except NotImplementedError as error:
                message = f"{path}: {name} is stored as {tensor.tensor_type.name}, which the gguf library cannot decode"
                raise CheckpointError(message, "use a file of another type, e.g. Q8_0") from error

    @property
    def keys(self) -> list[str]:
        """Names of all metadata."""
        return list(self._reader.fields)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key as plain Python; an fp32 number as the shortest decimal that is rounded to it."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value = field.contents()
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def of_arch(self, key: str, default: Any = None) -> Any:
        """The value of a hyperparameter, e.g. "block_count".

        Raises:
            CheckpointError: the file has none, and there is no default.
        """
        value = self.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the key {self.arch}.{key}", DAMAGED)
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor's values, rows first.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}", DAMAGED)
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """A tensor, or one expert's part of a stack, decoded and rounded once to `dtype`, on the CPU."""
        shape = self.shape(name) if expert is None else self.shape(name)[1:]
        out = torch.empty(shape, dtype=dtype)
        rows = out.view(-1, shape[-1])
        first = 0 if expert is None else expert * len(rows)
        step = max(1, VALUES // shape[-1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            part.copy_(self._decoded(name, slice(first + start, first + start + len(part))))
        return out

    def blocks(self, name: str) -> Tensor:
        """uint8 [rows, blocks, bytes of a block]: a quantized tensor as it is stored, a copy on the CPU."""
        tensor = self.tensors[name]
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        return torch.from_numpy(np.array(rows)).view(len(rows), -1, GGML_QUANT_SIZES[tensor.tensor_type][1])

    def _decoded(self, name: str, rows: slice) -> Tensor:
        """Rows of a tensor seen as a matrix, as the library decodes them: fp32 or fp16."""
        tensor = self.tensors[name]
        stored = tensor.data.reshape(-1, tensor.data.shape[-1])[rows]
        if tensor.tensor_type in STORED:
            return torch.from_numpy(np.array(stored))
        return torch.from_numpy(gguf.quants.dequantize(np.ascontiguousarray(stored), tensor.tensor_type))
