"""A GGUF file as a Hugging Face checkpoint: config, tokenizer and safetensors in 16 bits (32 where the file has 32)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...errors import TrainingError
from ...files import new_directory, write_json
from ...notices import notice
from ..checkpoint_files import INDEX
from .config import read_config
from .read import GgufFile
from .tensors import Entry, entries
from .tokenizer import read_tokenizer

SHARD_BYTES = 1 << 30
HEADROOM = 64 << 20  # bytes for tokenizer and config


def import_gguf(path: Path | str, folder: Path | str) -> Path:
    """Write the model in a GGUF file as a Hugging Face checkpoint: config, tokenizer, safetensors.

    Host memory holds one shard (1 GiB, or the largest tensor). Quantized weights are decoded and rounded to bf16.

    Args:
        folder: replaced when it is there.

    Raises:
        ModelError: an architecture, a tensor or a tokenizer that transformers has no place for.
        CheckpointError: a truncated file, a tensor that is missing, misshapen or cannot be decoded.
        TrainingError: no space. In every case nothing is left under `folder`.
    """
    folder = Path(folder)
    file = GgufFile(Path(path))
    config = read_config(file)
    found = entries(file, config)
    nbytes = sum(_nbytes(entry, config.dtype) for entry in found)
    _check_space(folder, nbytes + HEADROOM)
    tokenizer = read_tokenizer(file)
    dtype = str(config.dtype).removeprefix("torch.")
    notice(f"gguf-{path}", f"{path} is unpacked once into {folder} ({nbytes / 2**30:.2f} GiB, {dtype})")
    with new_directory(folder) as aside:
        tokenizer.save_pretrained(aside)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.save_pretrained(aside)
        ends = {file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
        write_json(aside / "generation_config.json", {"eos_token_id": sorted(ends)})
        _write_shards(aside, found, config.dtype)
    return folder


def _nbytes(entry: Entry, dtype: torch.dtype) -> int:
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _check_space(folder: Path, needed: int) -> None:
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise TrainingError(
            f"no space for {folder}: it takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
            "free some space, or set HALFBYTE_CACHE to a folder on another disk",
        )


def _shards(found: list[Entry], dtype: torch.dtype) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in found:
        if shard and size + _nbytes(entry, dtype) > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += _nbytes(entry, dtype)
    yield shard


def _write_shards(folder: Path, found: list[Entry], dtype: torch.dtype) -> None:
    shards = list(_shards(found, dtype))
    names = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        values: dict[str, Tensor] = {entry.name: entry.read().contiguous() for entry in shard}
        save_file(values, folder / name, metadata={"format": "pt"})
    where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(_nbytes(entry, dtype) for entry in found)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")
