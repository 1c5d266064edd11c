"""What each weight of a checkpoint of transformers is made of in a GGUF file: the reverse of `write_tensors`.

The names and shapes are those of the model built without storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gguf import TensorNameMap
from torch import Tensor

from ..architectures import auto_class, quantizable
from ..errors import CheckpointError, ModelError
from ..families import Family, of_config
from ..formats import Format
from ..formats.base import entry_name
from ..tensor import QuantizedTensor
from .file import DAMAGED, GgufFile
from .hyperparameters import ROPE_TENSORS
from .names import (
    STACKED_EXPERTS,
    experts_name,
    gguf_name,
    halved,
    holds_sum,
    layer_of,
    names_of,
    parts_of,
    shape_in_file,
    turned_heads,
)
from .to_formats import KEPT, kept_format, kept_parts


@dataclass(frozen=True)
class Entry:
    """A weight of the checkpoint to be.

    Attributes:
        name, shape: there.
        read: reads it on the CPU, decoded, or as a `QuantizedTensor` of `format`.
        format: what holds the file's own values; None for a weight that is decoded.
        type: of a linear layer that may be quantized, the file's name of its type, in words; else empty.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    format: Format | None = None
    type: str = ""

    def state(self) -> dict[str, Tensor]:
        """Name → tensor, of the entries that store it."""
        value = self.read()
        if not isinstance(value, QuantizedTensor):
            return {self.name: value.contiguous()}
        state = value.format.to_state(value.parts, self.shape, value.dtype)
        return {entry_name(self.name, suffix): part.contiguous() for suffix, part in state.items()}

    def nbytes(self, dtype: torch.dtype) -> int:
        """About how many bytes `state` has, where values that are not kept are of `dtype`."""
        bits = self.format.bits_per_weight(self.shape) if self.format else 8 * dtype.itemsize
        return int(torch.Size(self.shape).numel() * bits / 8)


def entries(file: GgufFile, config: Any, keep: bool = False) -> list[Entry]:
    """Everything in the checkpoint that the file stands for, in the order of the model. No values are read.

    Args:
        config: of transformers, of a family of the table.
        keep: linear layers as the file has them, where a format of ours holds its values.

    Raises:
        CheckpointError: the file lacks a tensor, or has one of another shape.
        ModelError: it has one that the model has no place for.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    family = of_config(config)
    assert family is not None
    reader = _Reader(file, config, family, names_of(family, config.num_hidden_layers))
    linears = {f"{name}.weight" for name in quantizable(model)}
    found: list[Entry] = []
    used = set(ROPE_TENSORS)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for source, entry in reader.placed(key, tuple(value.shape)):
            used.add(source)
            found.append(reader.linear(source, entry, keep) if key in linears else entry)
    extra = sorted(file.tensors.keys() - used)
    if extra:
        raise ModelError(
            f"{file.path}: {extra[0]} has no place in transformers' {config.model_type}", "use the original checkpoint"
        )
    return found


@dataclass(frozen=True)
class _Reader:
    """Finds and reads the tensors of one file."""

    file: GgufFile
    config: Any
    family: Family
    names: TensorNameMap

    def placed(self, key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Entry]]:
        """What a parameter of the model becomes: (the file's tensor, entry of the checkpoint)."""
        experts, dtype = self.family.experts, self.config.dtype
        if experts and (match := STACKED_EXPERTS.fullmatch(key)):
            count, rows, columns = shape
            named = {part: name for name, part in parts_of(experts).items()}
            parts = ("down",) if match[2] == "down_proj" else ("gate", "up")
            for part in parts:
                source, own = experts_name(layer_of(key), part), (rows // len(parts), columns)
                self._check(source, (count, *own))
                for index in range(count):
                    name = f"{self._in_block(match[1])}experts.{index}.{named[part]}.weight"
                    yield source, Entry(name, own, partial(self.file.values, source, dtype, index))
            return
        source = gguf_name(key, self.names, self.family)
        self._check(source, shape_in_file(source, shape))
        name = self._in_block(key) if experts and ".mlp.gate." in key else key
        yield source, Entry(name, shape, lambda: self._restored(source).view(shape))

    def _in_block(self, key: str) -> str:
        """A name in transformers' mixture as checkpoints have it."""
        return key.replace(".mlp.", f".{self.family.experts.block}.") if self.family.experts else key

    def linear(self, source: str, entry: Entry, keep: bool) -> Entry:
        """A linear layer's entry, in the file's own type if that is kept."""
        file = self.file
        type_ = file.tensors[source].tensor_type
        format_ = kept_format(type_, entry.shape) if keep else None
        if format_ is None:
            rows = f" of {entry.shape[0]} rows" if keep and type_ in KEPT else ""  # it is they that do not fit
            return replace(entry, type=type_.name + rows)
        heads = turned_heads(source, self.config, self.family)

        def read() -> QuantizedTensor:
            blocks = file.blocks(source)
            try:
                parts = kept_parts(type_, halved(blocks, heads) if heads else blocks)
            except CheckpointError as error:
                raise CheckpointError(f"{file.path}: {source} ({type_.name}): {error.message}", DAMAGED) from error
            return QuantizedTensor(format_, parts, entry.shape, self.config.dtype)

        return replace(entry, read=read, format=format_, type=type_.name)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.file.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.file.path}: {name} has shape {found}, expected {shape}", DAMAGED)

    def _restored(self, source: str) -> Tensor:
        """A tensor's values as transformers wants them."""
        dtype = self.config.dtype
        if holds_sum(source, self.family):
            return (self.file.values(source, torch.float32) - 1).to(dtype)
        value, heads = self.file.values(source, dtype), turned_heads(source, self.config, self.family)
        return halved(value, heads) if heads else value
