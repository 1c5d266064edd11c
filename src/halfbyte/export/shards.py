"""Writing safetensors files one tensor at a time, so that a shard is never in memory as a whole.

The `safetensors` library only writes from a dict of all tensors. Format: 8 bytes with the length of a JSON header
(little-endian), the header, then the tensors' bytes at the offsets in the header
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..reading.boundary import answered
from ..utils.errors import CheckpointError

ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """A tensor to write: `dtype` in safetensors' spelling, `nbytes` of its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(1, torch.Size(self.shape).numel())


def write_shard(
    path: Path, groups: Sequence[tuple[Entry, ...]], make: Callable[[tuple[Entry, ...]], Mapping[str, Tensor]]
) -> dict[str, int]:
    """Write the tensors of all `groups`; each group is computed when it is written.

    Args:
        make: entries of one group → name → tensor.

    Returns:
        Name → CRC-32 of the bytes written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    # larger item sizes first, so that every tensor is aligned
    for entry in sorted((entry for group in groups for entry in group), key=lambda entry: -entry.itemsize):
        starts[entry.name] = end
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    sums = {}
    with open(path, "wb") as file:
        start = file.write(len(text).to_bytes(8, "little") + text)
        for group in groups:
            tensors = make(group)
            for entry in group:
                raw = _bytes(tensors[entry.name])
                if raw.nbytes != entry.nbytes:
                    raise AssertionError(f"{entry.name}: {raw.nbytes} bytes made, {entry.nbytes} announced")
                file.seek(start + starts[entry.name])
                file.write(raw)
                sums[entry.name] = zlib.crc32(raw)
    return sums


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def check_shard(path: Path, sums: dict[str, int]) -> None:
    """Read a shard back through `safetensors` and compare every tensor's checksum.

    Raises:
        CheckpointError: a tensor is missing, unreadable or differs.
    """
    fix = "check the disk, and merge again"
    with answered(f"{path.name} cannot be read back", fix), safe_open(path, framework="pt") as file:
        for name, expected in sums.items():
            if zlib.crc32(_bytes(file.get_tensor(name))) != expected:
                raise CheckpointError(f"{path.name}: {name} on disk differs from what was written", fix)
