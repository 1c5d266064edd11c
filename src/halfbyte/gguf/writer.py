"""Write a GGUF file tensor by tensor, then read it back: shapes and keys by the gguf library, bytes by checksum, values
by the library's decoders.

Host memory holds one tensor of the checkpoint and its quantized bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from ..utils.errors import CheckpointError
from .file import GgufFile
from .quants import Type, quantize, row_bytes
from .tensors import Planned

# Largest relative error (RMS of the difference over RMS of the values) that rounding explains. Normal weights have
# about a third of it; a wrong layout gives 1 and more.
BOUNDS = {
    Type.F32: 0.0, Type.F16: 1e-3, Type.BF16: 4e-3, Type.Q8_0: 0.02, Type.Q4_0: 0.25, Type.Q4_1: 0.25,
    Type.Q5_0: 0.12, Type.Q5_1: 0.12, Type.Q2_K: 0.6, Type.Q3_K: 0.4, Type.Q4_K: 0.25,
    Type.Q5_K: 0.12, Type.Q6_K: 0.06,
}  # fmt: skip
DISK = "check the disk"
FP16_SCALES = 1e-5  # values far below this underflow in fp16 scales and become zeros


@dataclass(frozen=True)
class NewGguf:
    """Description of a GGUF file to write.

    Attributes:
        path: final path.
        arch: llama.cpp's name of the architecture.
        add_keys: adds all metadata keys.
        planned, types: its tensors, and their types by name.
        expected: metadata to verify after writing.
        tokens: size of its vocabulary; 0: none.
    """

    path: Path
    arch: str
    add_keys: Callable[[GGUFWriter], None]
    planned: list[Planned]
    types: Mapping[str, Type]
    expected: Mapping[str, object]
    tokens: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(_nbytes(tensor, self.types[tensor.name]) for tensor in self.planned)

    @property
    def numel(self) -> int:
        """Number of its weights."""
        return sum(torch.Size(tensor.shape).numel() for tensor in self.planned)


def write_gguf(
    file: NewGguf, path: Path, importances: Mapping[str, Tensor], device: torch.device, advance: Callable[[int], None]
) -> dict[str, float]:
    """Write `file` to `path`, and verify it.

    Args:
        path: temporary path.
        importances: tensor name → importances, as `quantize` takes them.
        device: quantizes on it.
        advance: called with the number of weights written.

    Returns:
        Type → the largest relative error of a sample, as `check_file`.

    Raises:
        CheckpointError: a weight that the type cannot store, importances of another width, or a file that reads back
            differently.
    """
    writer = GGUFWriter(path, file.arch)
    file.add_keys(writer)
    for tensor in file.planned:
        type_ = file.types[tensor.name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), _nbytes(tensor, type_), type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = []
    for tensor in file.planned:
        type_ = file.types[tensor.name]
        data, sample = _encoded(tensor, type_, importances.get(tensor.name), device)
        writer.write_tensor_data(data)
        written.append(Written(tensor.name, tensor.shape, type_, zlib.crc32(data.data), sample))
        advance(torch.Size(tensor.shape).numel())
    writer.close()
    return check_file(path, written, file.expected, file.tokens)


def _nbytes(planned: Planned, type_: Type) -> int:
    return torch.Size(planned.shape[:-1]).numel() * row_bytes(planned.shape[-1], type_)


def _encoded(
    planned: Planned, type_: Type, importance: Tensor | None, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """Encode a tensor; returns its bytes and its first rows in fp32."""
    data = np.empty(_nbytes(planned, type_), np.uint8)
    if importance is not None and importance.shape[-1] != planned.shape[-1]:
        wrong = f"the importance matrix has {importance.shape[-1]} columns for {planned.name}, not {planned.shape[-1]}"
        raise CheckpointError(wrong, "give this model's importance matrix, or a calibration text")
    start, sample = 0, np.empty(0, np.float32)
    for index, piece in enumerate(planned.pieces()):
        weight = piece.to(device)
        matrix_importance = importance[index] if importance is not None and importance.ndim > 1 else importance
        try:
            encoded = quantize(weight, type_, matrix_importance).flatten().cpu().numpy()
        except CheckpointError as error:
            raise CheckpointError(f"{planned.name}: {error.message}", error.fix) from error
        data[start : start + encoded.size] = encoded
        start += encoded.size
        if index == 0:
            rows = weight if weight.ndim == 1 else weight[: Written.ROWS]
            sample = rows.float().cpu().numpy()
    return data, sample


# --- reading back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A written tensor: its description, the CRC-32 of its bytes, and its first rows in fp32 before quantization."""

    name: str
    shape: tuple[int, ...]
    type: Type
    checksum: int
    sample: np.ndarray
    ROWS: ClassVar[int] = 16


def check_file(
    path: Path, written: Sequence[Written], expected: Mapping[str, object], tokens: int = 0
) -> dict[str, float]:
    """Read `path` and compare it with the written tensors.

    Args:
        expected: metadata to verify.
        tokens: size of its vocabulary; 0: none.

    Returns:
        Type → the largest relative error of a sample.

    Raises:
        CheckpointError: the tensor or key that differs.
    """
    file = GgufFile(path)
    for key, value in expected.items():
        if file.get(key) != value:
            raise CheckpointError(f"{path}: {key} reads back as {file.get(key)}, not {value}")
    if tokens and len(file.get("tokenizer.ggml.tokens", ())) != tokens:
        raise CheckpointError(f"{path}: the vocabulary reads back with another size", DISK)
    tensors = file.tensors
    if tensors.keys() != {record.name for record in written}:
        raise CheckpointError(f"{path}: the names of the tensors read back differently", DISK)
    errors: dict[str, float] = {}
    for record in written:
        tensor = tensors[record.name]
        if file.shape(record.name) != record.shape or tensor.tensor_type != record.type:
            described = f"{tensor.tensor_type.name} {tensor.shape}"
            raise CheckpointError(f"{path}: {record.name} reads back as {described}", DISK)
        stored = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        if zlib.crc32(stored.data) != record.checksum:
            raise CheckpointError(f"{path}: {record.name} reads back with other bytes", DISK)
        error = _error(stored, record)
        if not error <= BOUNDS[record.type]:
            wrong = f"{path}: {record.name} decodes with a relative error of {error:.2g}"
            raise CheckpointError(wrong, "choose another type, and report it")
        errors[record.type.name] = max(error, errors.get(record.type.name, 0.0))
    return errors


def _error(stored: np.ndarray, written: Written) -> float:
    """RMS of the sample's error divided by the sample's RMS."""
    columns = written.sample.shape[-1]
    rows = written.sample.size // columns
    encoded = stored[: rows * row_bytes(columns, written.type)].reshape(rows, -1)
    decoded = gguf.quants.dequantize(encoded, written.type).reshape(written.sample.shape)
    size = float(np.sqrt(np.mean(written.sample.astype(np.float64) ** 2)))
    off = float(np.sqrt(np.mean((decoded.astype(np.float64) - written.sample) ** 2)))
    return off / (size + FP16_SCALES)
