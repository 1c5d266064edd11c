"""A GGUF file: checked keys, memory-mapped tensors, and values decoded a few rows at a time.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs")
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
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

VALUES = 1 << 24  # values decoded at once: 64 MiB in fp32
STORED = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16}
NUMPY = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        shape: rows first.
        data: memory-mapped: [..., columns] of fp32 or fp16, or uint8 [..., bytes of a row].
    """

    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: its path.
        arch: llama.cpp's name of the architecture.
        tensors: its tensors by name.

    Raises:
        ModelError: one part of a split file.
        CheckpointError: not a GGUF file, a truncated one, a key of a wrong type, or a tensor of a type that the gguf
            library cannot decode.
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
        self.tensors = {tensor.name: self._tensor(tensor, mapped) for tensor in head.tensors}

    def _tensor(self, described: Described, mapped: np.ndarray) -> GgufTensor:
        """Map a tensor's data after checking that it lies within the file."""
        name, shape = described.name, described.shape
        try:
            type_ = GGMLQuantizationType(described.type)
        except ValueError as error:
            raise self._undecoded(name, f"a type with the number {described.type}") from error
        if not _is_decoded(type_):
            raise self._undecoded(name, type_.name)
        block, nbytes = GGML_QUANT_SIZES[type_]
        if not shape or 0 in shape or shape[-1] % block:
            raise CheckpointError(f"{self.path}: {name} has shape {shape}, which does not fit {type_.name}", DAMAGED)
        size = math.prod(shape) // block * nbytes
        if described.start + size > len(mapped):
            raise CheckpointError(
                f"{self.path} is truncated: {name} of shape {shape} ends at byte {described.start + size}, and the file"
                f" has {len(mapped)}",
                DAMAGED,
            )
        data = mapped[described.start : described.start + size]
        return GgufTensor(type_, shape, data.view(NUMPY.get(type_, np.uint8)).reshape(*shape[:-1], -1))

    def _undecoded(self, name: str, type_name: str) -> CheckpointError:
        message = f"{self.path}: {name} is stored as {type_name}, which the gguf library cannot decode"
        return CheckpointError(message, "use a file of another type, e.g. Q8_0")

    @property
    def keys(self) -> list[str]:
        """Names of all metadata keys."""
        return list(self._keys)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key as plain Python; an fp32 number as the shortest decimal that rounds to it."""
        value = self._keys.get(key, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def of_arch(self, key: str, default: Any = None) -> Any:
        """The value of a hyperparameter, e.g. "block_count".

        Raises:
            CheckpointError: the key is missing without a default, or its value is invalid.
        """
        value = self.get(f"{self.arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.path} has no key {self.arch}.{key}", DAMAGED)
        check_hyperparameter(self.path, f"{self.arch}.{key}", value)
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor's values, rows first.

        Raises:
            CheckpointError: there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name}", DAMAGED)
        return self.tensors[name].shape

    def values(self, name: str, dtype: torch.dtype, expert: int | None = None) -> Tensor:
        """Decode a tensor, or one expert of a stack, and round it once to `dtype`, on the CPU."""
        shape = self.shape(name) if expert is None else self.shape(name)[1:]
        out = torch.empty(shape, dtype=dtype)
        rows = out.view(-1, shape[-1])
        first = 0 if expert is None else expert * len(rows)
        step = max(1, VALUES // shape[-1])
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            chunk.copy_(_decode(self.tensors[name], slice(first + start, first + start + len(chunk))))
        return out

    def blocks(self, name: str) -> Tensor:
        """Copy a quantized tensor's stored bytes to the CPU, uint8 [rows, blocks, bytes per block]."""
        tensor = self.tensors[name]
        rows = tensor.data.reshape(-1, tensor.data.shape[-1])
        return torch.from_numpy(np.array(rows)).view(len(rows), -1, GGML_QUANT_SIZES[tensor.tensor_type][1])


@functools.cache
def _is_decoded(type_: GGMLQuantizationType) -> bool:
    """Return whether the gguf library decodes a type, tested on one block of zeros."""
    try:
        gguf.quants.dequantize(np.zeros(GGML_QUANT_SIZES[type_][1], np.uint8), type_)
    except NotImplementedError:
        return False
    return True


def _decode(tensor: GgufTensor, rows: slice) -> Tensor:
    """Decode rows of a tensor, viewed as a matrix, with the gguf library, to fp32 or fp16."""
    stored = tensor.data.reshape(-1, tensor.data.shape[-1])[rows]
    if tensor.tensor_type in STORED:
        return torch.from_numpy(np.array(stored))
    return torch.from_numpy(gguf.quants.dequantize(np.ascontiguousarray(stored), tensor.tensor_type))


# --- checks of keys ---------------------------------------------------------------------------------------------------

LARGEST = 2**31 - 1
TOKENIZER = "tokenizer.ggml."
PER_TOKEN = ("scores", "token_type")
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
FP32 = ("scale", "softcapping", "factor")  # endings of an architecture's keys with fp32 values
POSITIVE = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv",
    "key_length", "value_length", "dimension_count",
)  # fmt: skip
# Keys whose value may be a list, one for each layer or axis.
LISTS = ("feed_forward_length", "head_count", "head_count_kv", "dimension_sections")

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return type(value) is str


def _integer(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


# key → check of its value, and the name of a valid value for errors
KINDS: dict[str, tuple[Check, str]] = {
    "general.architecture": (_text, "text"),
    "split.count": (_integer, "a count"),
    "tokenizer.chat_template": (_text, "text"),
    **{f"{TOKENIZER}{name}": (_text, "text") for name in ("model", "pre")},
    f"{TOKENIZER}tokens": (_list_of(_text), "a list of texts"),
    f"{TOKENIZER}merges": (_list_of(lambda merge: type(merge) is str and merge.count(" ") == 1), "a list of pairs"),
    f"{TOKENIZER}scores": (_list_of(lambda score: type(score) is float and not math.isnan(score)), "a list of numbers"),
    f"{TOKENIZER}token_type": (_list_of(_integer), "a list of numbers"),
    **{f"{TOKENIZER}{name}_token_id": (_integer, "a token's number") for name in SPECIAL},
    **{
        f"{TOKENIZER}{name}": (lambda value: type(value) is bool, "true or false")
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    },
}


def check_keys(path: Path, keys: Mapping[str, Any]) -> None:
    """Check the types and bounds of a file's general and tokenizer keys.

    Raises:
        CheckpointError: the first invalid key.
    """
    for key, (is_valid, expected) in KINDS.items():
        if key in keys and not is_valid(keys[key]):
            raise _wrong(path, key, expected, keys[key])
    tokens = keys.get(f"{TOKENIZER}tokens", [])
    for name in PER_TOKEN:
        if (length := len(keys.get(f"{TOKENIZER}{name}", tokens))) != len(tokens):
            raise CheckpointError(f"{path}: {TOKENIZER}{name} has {length} values for {len(tokens)} tokens", DAMAGED)
    for name in SPECIAL:
        if tokens and keys.get(key := f"{TOKENIZER}{name}_token_id", 0) >= len(tokens):
            raise CheckpointError(f"{path}: {key} is {keys[key]}, and the vocabulary has {len(tokens)} tokens", DAMAGED)


def check_hyperparameter(path: Path, key: str, value: Any) -> None:
    """Check the value of an architecture's key, e.g. "llama.block_count".

    Raises:
        CheckpointError: it is invalid.
    """
    last = key.rpartition(".")[2]
    if last == "type":
        is_valid, expected = _text, "text"
    elif last.endswith((*FP32, "epsilon")):
        is_valid, expected = _number, "a number"
    elif last.startswith("freq_base"):
        is_valid, expected = (lambda value: _number(value) and value > 0), "a number above 0"
    elif last in POSITIVE:
        is_valid, expected = (lambda value: _integer(value) and value > 0), "a whole number above 0"
    else:
        is_valid, expected = _integer, "a whole number"
    if not all(map(is_valid, value if isinstance(value, list) and last in LISTS else [value])):
        raise _wrong(path, key, expected, value)


def _wrong(path: Path, key: str, expected: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{path}: {key} must be {expected}, not {value!r:.80}", DAMAGED)
