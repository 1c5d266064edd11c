"""Reading back what was written: shapes and keys by the gguf library, bytes by checksum, values by its decoders."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np

from ..utils.errors import CheckpointError
from .file import GgufFile
from .types import Type, row_bytes

# Largest relative error (RMS of the difference over RMS of the values) that rounding explains. What normal weights get
# is about a third of these; a wrong layout gives 1 and more.
BOUNDS = {
    Type.F32: 0.0, Type.F16: 1e-3, Type.BF16: 4e-3, Type.Q8_0: 0.02, Type.Q4_0: 0.25, Type.Q4_1: 0.25,
    Type.Q5_0: 0.12, Type.Q5_1: 0.12, Type.Q2_K: 0.6, Type.Q3_K: 0.4, Type.Q4_K: 0.25,
    Type.Q5_K: 0.12, Type.Q6_K: 0.06,
}  # fmt: skip
DISK = "check the disk"
FP16_SCALES = 1e-5  # values well below this have no scale in fp16 and become zeros


@dataclass(frozen=True)
class Written:
    """What was written of a tensor: `sample` are its first rows in fp32, before they were quantized."""

    name: str
    shape: tuple[int, ...]
    type: Type
    checksum: int
    sample: np.ndarray
    ROWS: ClassVar[int] = 16


def check_file(
    path: Path, written: Sequence[Written], expected: Mapping[str, object], tokens: int = 0
) -> dict[str, float]:
    """Read `path` and compare it with what was to be written.

    Args:
        expected: some of its metadata.
        tokens: of its vocabulary; 0: it has none.

    Returns:
        Type → the largest relative error of a sample.

    Raises:
        CheckpointError: naming the tensor or key that is not as it should be.
    """
    file = GgufFile(path)
    for key, value in expected.items():
        if file.get(key) != value:
            raise CheckpointError(f"{path}: {key} reads back as {file.get(key)}, not {value}")
    if tokens and len(file.get("tokenizer.ggml.tokens", ())) != tokens:
        raise CheckpointError(f"{path}: the vocabulary does not read back", DISK)
    found = file.tensors
    if found.keys() != {each.name for each in written}:
        raise CheckpointError(f"{path}: other tensors than were written", DISK)
    errors: dict[str, float] = {}
    for each in written:
        tensor = found[each.name]
        if file.shape(each.name) != each.shape or tensor.tensor_type != each.type:
            raise CheckpointError(f"{path}: {each.name} reads back as {tensor.tensor_type.name} {tensor.shape}", DISK)
        stored = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        if zlib.crc32(stored.data) != each.checksum:
            raise CheckpointError(f"{path}: {each.name} reads back with other bytes", DISK)
        error = _error(stored, each)
        if not error <= BOUNDS[each.type]:
            wrong = f"{path}: {each.name} decodes to values that are {error:.2g} off"
            raise CheckpointError(wrong, "choose another type, and report it")
        errors[each.type.name] = max(error, errors.get(each.type.name, 0.0))
    return errors


def _error(stored: np.ndarray, written: Written) -> float:
    """RMS of the sample's error over the RMS of the sample."""
    columns = written.sample.shape[-1]
    rows = written.sample.size // columns
    encoded = stored[: rows * row_bytes(columns, written.type)].reshape(rows, -1)
    decoded = gguf.quants.dequantize(encoded, written.type).reshape(written.sample.shape)
    size = float(np.sqrt(np.mean(written.sample.astype(np.float64) ** 2)))
    off = float(np.sqrt(np.mean((decoded.astype(np.float64) - written.sample) ** 2)))
    return off / (size + FP16_SCALES)
