"""Import of a GGUF file as a Hugging Face checkpoint: config, tokenizer and safetensors in 16 bits (32 if the file has
fp32).

With `keep`, linear layers are stored in the halfbyte formats that hold their values exactly, as in a quantized
checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from ..formats.base import QUANT_METHOD
from ..reading.boundary import answered
from ..reading.gguf import DAMAGED
from ..reading.tensors import INDEX
from ..utils.errors import ConfigError
from ..utils.files import check_space, new_directory, write_json
from ..utils.notices import notice
from ..utils.text import counts
from .file import GgufFile
from .formats import EXACT
from .general import CONFIG_KEY, read_descriptions, read_sampling
from .hyperparameters import read_config
from .tensors import Entry, entries
from .tokenizer import read_tokenizer

SHARD_BYTES = 1 << 30
EXACT_NAMES = tuple(type_.name for type_ in EXACT)
HEADROOM = 64 << 20  # bytes for tokenizer and config


def import_gguf(path: Path | str, folder: Path | str, *, keep: bool = False) -> Path:
    """Write the model in a GGUF file as a Hugging Face checkpoint: config, tokenizer, safetensors.

    Host memory holds one shard (1 GiB, or the largest tensor). Quantized weights are decoded and rounded to bf16.

    Args:
        folder: replaced if it exists.
        keep: store linear layers without decoding where a format holds their type exactly; the checkpoint is then a
            quantized one.

    Raises:
        ModelError: an architecture, a tensor or a tokenizer that transformers does not support.
        CheckpointError: a truncated file, or a tensor that is missing, misshapen or cannot be decoded.
        ConfigError: no layer can be stored as in the file.
        TrainingError: no disk space. After any error nothing is left under `folder`.
    """
    folder = Path(folder)
    file = GgufFile(Path(path))
    with answered(f"cannot read a model from {path}", DAMAGED):
        config = read_config(file)
        weights = entries(file, config, keep)
        tokenizer = read_tokenizer(file)
    if descriptions := read_descriptions(file):
        setattr(config, CONFIG_KEY, descriptions)
    if keep:
        config.quantization_config = _quantization_config(file, weights)
    nbytes = sum(weight.nbytes(config.dtype) for weight in weights)
    check_space(folder, nbytes + HEADROOM, "free some space, or set HALFBYTE_CACHE to a folder on another disk")
    message = f"importing {path} into {folder} ({nbytes / 2**30:.2f} GiB), once"
    exact = Counter(weight.type for weight in weights if weight.type in EXACT_NAMES)
    if exact and not keep:
        message += f"; set `quantization: keep` to store these linear layers as in the file: {counts(exact)}"
    notice(f"gguf-{folder}", message)
    with new_directory(folder) as aside:
        tokenizer.save_pretrained(aside)
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config.architectures = [architecture.__name__]
        config.save_pretrained(aside)
        ends = {file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
        write_json(aside / "generation_config.json", {"eos_token_id": sorted(ends)} | read_sampling(file))
        _write_shards(aside, weights, config.dtype)
    return folder


def _quantization_config(file: GgufFile, weights: list[Entry]) -> dict[str, Any]:
    """The quantization_config of a checkpoint with layers stored as in the file, see `HalfbyteConfig`."""
    linears = [entry for entry in weights if entry.type]
    exact = Counter(entry.type for entry in linears if entry.format)
    decoded = Counter(entry.type for entry in linears if not entry.format)
    if not exact:
        raise ConfigError(
            f"quantization: keep: no linear layer of {file.path} has a type that halfbyte stores exactly:"
            f" {counts(decoded)} (exact are {', '.join(EXACT_NAMES)})",
            "remove `quantization: keep`: layers are then decoded and quantized as configured",
        )
    formats: dict[str, list[str]] = {}
    for entry in linears:
        if entry.format:
            formats.setdefault(entry.format.spec, []).append(entry.name.removesuffix(".weight"))
    return {"quant_method": QUANT_METHOD, "formats": formats, "kept": exact, "others": decoded}


def _write_shards(folder: Path, weights: list[Entry], dtype: torch.dtype) -> None:
    """Write the weights in files of about `SHARD_BYTES`, and their index."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.nbytes(dtype) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.nbytes(dtype)
    weight_map: dict[str, str] = {}
    total = 0
    for index, shard in enumerate(shards, 1):
        name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        tensors = {key: tensor for weight in shard for key, tensor in weight.state().items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / INDEX).write_text(text, encoding="utf-8")
