"""The head of a GGUF file: its keys, and where its tensors lie. Standard library only, and bounded.

The gguf library's reader believes the counts that a file states: 2⁶² numbers of an array that is not there keep it busy
for ever. Here every count is compared with the bytes that are left before anything is made of it.
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
ALIGNMENT = 32  # of the data, where general.alignment says nothing
DAMAGED = "download or convert the file again"
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type → struct's
STRING, ARRAY = 8, 9
MOST_VALUES = 1 << 23  # of an array; vocabularies have 3e5 tokens
MOST_DIMENSIONS = 4  # ggml's
SMALLEST_KEY, SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8  # bytes


@dataclass(frozen=True)
class Described:
    """A tensor as the head describes it.

    Attributes:
        shape: rows first (the file has them last).
        type: ggml's number of it.
        start: of its data, in bytes from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


@dataclass(frozen=True)
class Head:
    """Keys with their values as plain Python, and tensors in the order of the file; `size` of the file in bytes."""

    keys: dict[str, Any]
    tensors: list[Described]
    size: int


def read_head(path: Path) -> Head:
    """Keys and tensors' descriptions of a GGUF file. Whether the tensors' data fit is not known here: see `GgufFile`.

    Raises:
        CheckpointError: it cannot be read, is truncated, or no GGUF file.
    """
    with open_bytes(path, CheckpointError, DAMAGED) as file:
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).head()
        except (ValueError, struct.error) as error:
            raise CheckpointError(f"{path} is truncated, or no GGUF file: {error}", DAMAGED) from error


class _Cursor:
    """Reads values one after another; ValueError says what is wrong with them."""

    def __init__(self, data: Any):
        self.data, self.at = data, 0

    def head(self) -> Head:
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
                raise ValueError(f"the key {name} is there twice")
            values[name] = self.value(self.number("I"), name)
        self.check(tensors, SMALLEST_TENSOR, "tensors")
        found = [self.tensor() for _ in range(tensors)]
        if len({each.name for each in found}) < len(found):
            raise ValueError("a tensor is there twice")
        start = self.data_start(values.get("general.alignment", ALIGNMENT))
        placed = [Described(each.name, each.shape, each.type, start + each.start) for each in found]
        return Head(values, placed, len(self.data))

    def data_start(self, alignment: Any) -> int:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, no power of two")
        return -(-self.at // alignment) * alignment

    def check(self, count: int, nbytes: int, what: str) -> None:
        """Whether `count` things of at least `nbytes` each can be in what is left."""
        left = len(self.data) - self.at
        if count * nbytes > left:
            raise ValueError(f"it says that {count} {what} follow, and {left} bytes are left")

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        self.check(length, 1, "bytes of text")
        self.at += length
        return str(self.data[self.at - length : self.at], "utf-8")

    def value(self, kind: int, name: str) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"the key {name} is of an unknown type, {kind}")
        kind, count = self.number("I"), self.number("Q")
        if kind not in SCALARS and kind != STRING:
            raise ValueError(f"the key {name} is an array of type {kind}, which no model has")
        self.check(count, 8 if kind == STRING else struct.calcsize(f"<{SCALARS[kind]}"), f"values of {name}")
        if count > MOST_VALUES:
            raise ValueError(f"the key {name} has {count} values, more than {MOST_VALUES}")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        values = struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, self.at)
        self.at += struct.calcsize(f"<{count}{SCALARS[kind]}")
        return list(values)

    def tensor(self) -> Described:
        name, dimensions = self.text(), self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return Described(name, shape, self.number("I"), self.number("Q"))
