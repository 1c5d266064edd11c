"""Writing a GGUF file: one tensor after another is read, quantized and written; then the file is read back.

Host memory holds one tensor of the checkpoint and its quantized bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter
from torch import Tensor

from ..utils.errors import CheckpointError
from .read_back import Written, check_file
from .tensors import Planned
from .types import Type, quantize, row_bytes


@dataclass(frozen=True)
class NewGguf:
    """A file to write.

    Attributes:
        path: where.
        arch: llama.cpp's name of the architecture.
        add_keys: adds all keys to the file.
        planned, types: its tensors, and their types by name.
        expected: some of the keys, to look at again when it is written.
        tokens: of its vocabulary; 0: it has none.
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
        """Size of its tensors."""
        return sum(_nbytes(each, self.types[each.name]) for each in self.planned)

    @property
    def numel(self) -> int:
        """How many weights it holds."""
        return sum(torch.Size(each.shape).numel() for each in self.planned)


def write_gguf(
    file: NewGguf, path: Path, importances: Mapping[str, Tensor], device: torch.device, advance: Callable[[int], None]
) -> dict[str, float]:
    """Write `file` to `path`, and read it back.

    Args:
        path: a place aside.
        importances: tensor name → weights of the quantization errors, as `quantize` takes them.
        device: where to quantize.
        advance: called with the number of weights written.

    Returns:
        As `check_file`.

    Raises:
        CheckpointError: a weight that the type cannot hold, importances of another width, or a file that does not read
            back as it was written.
    """
    writer = GGUFWriter(path, file.arch)
    file.add_keys(writer)
    for each in file.planned:
        type_ = file.types[each.name]
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), _nbytes(each, type_), type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    written = []
    for each in file.planned:
        type_ = file.types[each.name]
        data, sample = _encoded(each, type_, importances.get(each.name), device)
        writer.write_tensor_data(data)
        written.append(Written(each.name, each.shape, type_, zlib.crc32(data.data), sample))
        advance(torch.Size(each.shape).numel())
    writer.close()
    return check_file(path, written, file.expected, file.tokens)


def _nbytes(planned: Planned, type_: Type) -> int:
    return torch.Size(planned.shape[:-1]).numel() * row_bytes(planned.shape[-1], type_)


def _encoded(
    planned: Planned, type_: Type, importance: Tensor | None, device: torch.device
) -> tuple[np.ndarray, np.ndarray]:
    """A tensor's bytes, and its first values in fp32."""
    data = np.empty(_nbytes(planned, type_), np.uint8)
    if importance is not None and importance.shape[-1] != planned.shape[-1]:
        wrong = f"the importance matrix has {importance.shape[-1]} columns for {planned.name}: it is another model's"
        raise CheckpointError(wrong, "give this model's, or a calibration text")
    start, sample = 0, np.empty(0, np.float32)
    for index, piece in enumerate(planned.pieces()):
        weight = piece.to(device)
        weighed = importance[index] if importance is not None and importance.ndim > 1 else importance
        try:
            encoded = quantize(weight, type_, weighed).flatten().cpu().numpy()
        except CheckpointError as error:
            raise CheckpointError(f"{planned.name}: {error.message}", error.fix) from error
        data[start : start + encoded.size] = encoded
        start += encoded.size
        if index == 0:
            rows = weight if weight.ndim == 1 else weight[: Written.ROWS]
            sample = rows.float().cpu().numpy()
    return data, sample
