"""Bounded reader for the header of a GGUF file: keys, and names, shapes and offsets of tensors. Standard library only.

The gguf library's reader trusts the counts in a file: a missing array of 2⁶² numbers blocks it forever. This reader
compares every count with the remaining bytes first.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import CheckpointError
from .files import open_bytes

VERSIONS = (2, 3)
ALIGNMENT = 32  # default of general.alignment, in bytes
DAMAGED = "download or convert the file again"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct's
STRING, ARRAY = 8, 9
MOST_VALUES = 1 << 23  # values of an array; vocabularies have 3e5 tokens
MOST_DIMENSIONS = 4  # ggml's limit
SMALLEST_KEY, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes


@dataclass(frozen=True)
class Described:
    """Header entry of a tensor.

    Attributes:
        shape: rows first (the file stores them last).
        type: ggml's type number.
        start: offset of its data in bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


@dataclass(frozen=True)
class Head:
    """Header of a file: keys with plain Python values, tensors in file order, and the file's size in bytes."""

    keys: dict[str, Any]
    tensors: list[Described]
    size: int


def read_head(path: Path) -> Head:
    """Read the header of a GGUF file. `GgufFile` checks that the tensors' data fit into the file.

    Raises:
        CheckpointError: it cannot be read, is truncated, or is not a GGUF file.
    """
    with open_bytes(path, CheckpointError, DAMAGED) as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).head()
        except (ValueError, struct.error) as error:
            raise CheckpointError(f"{path} is truncated, or no GGUF file: {error}", DAMAGED) from error


class _Cursor:
    """Reads values sequentially; raises ValueError with the reason."""

    def __init__(self, data: Any):
        self.data, self.at = data, 0

    def head(self) -> Head:
        """Read the header."""
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self.at = 4
        version = self.number("I")
        if version not in VERSIONS:
            words = "is big-endian" if version & 0xFFFF == 0 else f"has version {version}"
            raise ValueError(f"it {words}; versions {VERSIONS[0]} and {VERSIONS[1]} are read, little-endian")
        tensors, keys = self.number("Q"), self.number("Q")
        self.check(keys, SMALLEST_KEY, "keys")
        values = dict[str, Any]()
        for _ in range(keys):
            name = self.text()
            if name in values:
                raise ValueError(f"the key {name} occurs twice")
            values[name] = self.value(self.number("I"), name)
        self.check(tensors, SMALLEST_TENSOR, "tensors")
        described = [self.tensor() for _ in range(tensors)]
        if len({tensor.name for tensor in described}) < len(described):
            raise ValueError("a tensor occurs twice")
        start = self.data_start(values.get("general.alignment", ALIGNMENT))
        placed = [Described(tensor.name, tensor.shape, tensor.type, start + tensor.start) for tensor in described]
        return Head(values, placed, len(self.data))

    def data_start(self, alignment: Any) -> int:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        return -(-self.at // alignment) * alignment

    def check(self, count: int, nbytes: int, items: str) -> None:
        """Check that `count` items of at least `nbytes` each fit into the remaining bytes."""
        left = len(self.data) - self.at
        if count * nbytes > left:
            raise ValueError(f"it declares {count} {items}, and {left} bytes are left")

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.check(length, 1, "bytes of text")
        self.at += length
        return str(self.data[self.at - length : self.at], "utf-8")

    def value(self, type_id: int, name: str) -> Any:
        if type_id == STRING:
            return self.text()
        if type_id in SCALARS:
            return self.number(SCALARS[type_id])
        if type_id != ARRAY:
            raise ValueError(f"the key {name} is of an unknown type, {type_id}")
        type_id, count = self.number("I"), self.number("Q")
        if type_id not in SCALARS and type_id != STRING:
            raise ValueError(f"the key {name} is an array of type {type_id}, which is not supported")
        self.check(count, 8 if type_id == STRING else struct.calcsize(f"<{SCALARS[type_id]}"), f"values of {name}")
        if count > MOST_VALUES:
            raise ValueError(f"the key {name} has {count} values, more than {MOST_VALUES}")
        if type_id == STRING:
            return [self.text() for _ in range(count)]
        values = struct.unpack_from(f"<{count}{SCALARS[type_id]}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{SCALARS[type_id]}")
        return list(values)

    def tensor(self) -> Described:
        name, dimensions = self.text(), self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return Described(name, shape, self.number("I"), self.number("Q"))
