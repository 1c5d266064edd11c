"""Where each weight of a transformers model lies in a GGUF file: the reverse of `export.gguf.tensors`.

The names and shapes are those of the model built without storage, brought to the file's names by the gguf library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map
from torch import Tensor

from ...architectures import auto_class
from ...errors import CheckpointError, ModelError
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
    """A tensor of the checkpoint to be: its name and shape there, and a function that reads it on the CPU."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def entries(file: GgufFile, config: Any) -> list[Entry]:
    """Everything in the checkpoint that the file stands for, in the order of the model. No values are read.

    Raises:
        CheckpointError: the file lacks a tensor, or has one of another shape.
        ModelError: it has one that the model has no place for.
    """
    arch = next(each for each, name in MODEL_ARCH_NAMES.items() if name == file.arch)
    names = get_tensor_name_map(MODEL_ARCH(arch), config.num_hidden_layers)
    with torch.device("meta"):
        state = auto_class(config).from_config(config).state_dict()
    found: list[Entry] = []
    used = set(MADE)
    for key, value in state.items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for source, entry in _placed(file, key, tuple(value.shape), names, config):
            used.add(source)
            found.append(entry)
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


def _check(file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
    if file.shape(name) != shape:
        raise CheckpointError(f"{file.path}: {name} has shape {file.shape(name)}, expected {shape}", DAMAGED)


def _restored(file: GgufFile, source: str, config: Any) -> Tensor:
    """A tensor's values as transformers wants them."""
    if file.arch.startswith("gemma") and source.endswith("norm.weight"):  # the file holds 1 + weight
        return (file.values(source, torch.float32) - 1).to(config.dtype)
    value = file.values(source, config.dtype)
    if file.arch in PERMUTED and (".attn_q." in source or ".attn_k." in source):
        return halved(value, config.num_attention_heads if ".attn_q." in source else config.num_key_value_heads)
    return value


def halved(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · size, …] of each head from the pairs that RoPE turns one after another, as ggml has them, to (all
    first halves, all second halves): undoes `export.gguf.tensors.interleaved`."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
