"""Where each weight of a transformers model lies in a GGUF file: the reverse of `export.gguf.tensors`.

The names and shapes are those of the model built without storage, brought to the file's names by the gguf library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from ...architectures import auto_class
from ...errors import CheckpointError, ModelError
from ...formats import Format
from ...formats.base import entry_name
from ...tensor import QuantizedTensor
from ..quantizer import quantizable
from .keep import KEPT, kept_format, kept_parts
from .read import DAMAGED, GgufFile

PERMUTED = ("llama",)  # RoPE turns neighbouring pairs there: rows of q and k are reordered
EXPERTS = re.compile(r"(model\.layers\.(\d+)\.)mlp\.experts\.(gate_up_proj|down_proj)")
EXPERT_NAMES = {  # parts of an expert, as checkpoints name them
    "mixtral": {"gate": "block_sparse_moe.experts.{}.w1", "down": "block_sparse_moe.experts.{}.w2",
                "up": "block_sparse_moe.experts.{}.w3"},
    "": {part: f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip
MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # they are in the config


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
        keep: linear layers as the file has them, where a format of ours holds its values.

    Raises:
        CheckpointError: the file lacks a tensor, or has one of another shape.
        ModelError: it has one that the model has no place for.
    """
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == file.arch)
    names = get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    linears = {f"{name}.weight" for name in quantizable(model)}
    found: list[Entry] = []
    used = set(MADE)
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for source, entry in _placed(file, key, tuple(value.shape), names, config):
            used.add(source)
            found.append(_linear(file, source, entry, config, keep) if key in linears else entry)
    extra = sorted(file.tensors.keys() - used)
    if extra:
        raise ModelError(
            f"{file.path}: {extra[0]} has no place in transformers' {config.model_type}", "use the original checkpoint"
        )
    return found


def _placed(
    file: GgufFile, key: str, shape: tuple[int, ...], names: TensorNameMap, config: Any
) -> Iterator[tuple[str, Entry]]:
    """What a parameter of the model becomes: (the file's tensor, entry of the checkpoint)."""
    dtype = config.dtype
    if match := EXPERTS.fullmatch(key):
        experts, rows, columns = shape
        parts = ("down",) if match[3] == "down_proj" else ("gate", "up")
        for part in parts:
            source = f"blk.{match[2]}.ffn_{part}_exps.weight"
            own = (rows // len(parts), columns)
            _check(file, source, (experts, *own))
            pattern = EXPERT_NAMES.get(config.model_type, EXPERT_NAMES[""])[part]
            for index in range(experts):
                name = f"{match[1]}{pattern.format(index)}.weight"
                yield source, Entry(name, own, partial(file.values, source, dtype, index))
        return
    placed = names.get_type_and_name(key, try_suffixes=(".weight", ".bias"))
    if placed is None:
        raise ModelError(f"{key} has no place in llama.cpp's {file.arch} architecture", "use the original checkpoint")
    source = str(placed[1])
    in_file = shape[-1:] if source.endswith("ffn_gate_inp_shexp.weight") else shape
    _check(file, source, in_file)
    name = key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.model_type == "mixtral" else key
    yield source, Entry(name, shape, lambda: _restored(file, source, config).view(shape))


def _linear(file: GgufFile, source: str, entry: Entry, config: Any, keep: bool) -> Entry:
    type_ = file.tensors[source].tensor_type
    format_ = kept_format(type_, entry.shape) if keep else None
    if format_ is None:
        rows = f" of {entry.shape[0]} rows" if keep and type_ in KEPT else ""  # it is they that do not fit
        return replace(entry, type=type_.name + rows)
    heads = _turned_heads(file, source, config)

    def read() -> QuantizedTensor:
        blocks = file.blocks(source)
        try:
            parts = kept_parts(type_, halved(blocks, heads) if heads else blocks)
        except CheckpointError as error:
            raise CheckpointError(f"{file.path}: {source} ({type_.name}): {error.message}", DAMAGED) from error
        return QuantizedTensor(format_, parts, entry.shape, config.dtype)

    return replace(entry, read=read, format=format_, type=type_.name)


def _check(file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    if file.shape(name) != shape:
        raise CheckpointError(f"{file.path}: {name} has shape {file.shape(name)}, expected {shape}", DAMAGED)


def _restored(file: GgufFile, source: str, config: Any) -> Tensor:
    """A tensor's values as transformers wants them."""
    if file.arch.startswith("gemma") and source.endswith("norm.weight"):  # the file holds 1 + weight
        return (file.values(source, torch.float32) - 1).to(config.dtype)
    value, heads = file.values(source, config.dtype), _turned_heads(file, source, config)
    return halved(value, heads) if heads else value


def _turned_heads(file: GgufFile, source: str, config: Any) -> int:
    """How many heads a tensor's rows are of, where the file has them in another order; else 0."""
    if file.arch not in PERMUTED or not (".attn_q." in source or ".attn_k." in source):
        return 0
    return config.num_attention_heads if ".attn_q." in source else config.num_key_value_heads


def halved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, …] of each head from the pairs that RoPE turns one after another, as ggml has them, to (all
    first halves, all second halves): undoes `export.gguf.tensors.interleaved`."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
