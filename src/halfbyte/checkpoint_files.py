"""Looks over a checkpoint's files before anything is loaded: every shard there, whole, and readable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as PEFT saves them


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a local checkpoint, in order; empty when it holds no safetensors.

    Raises:
        CheckpointError: the index is not JSON or names a file that is not there.
    """
    index = folder / INDEX
    if not index.exists():
        return [folder / SINGLE] if (folder / SINGLE).exists() else []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error}", "re-download the checkpoint") from error
    for name in names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing, though {INDEX} names it", "re-download the checkpoint")
    return [folder / name for name in names]


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """What adapter_config.json of a local folder says.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG}", "name a folder that PEFT saved")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict):
            raise TypeError(f"it holds a {type(document).__name__}, not an object")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", "copy the adapter there again") from error
    return document


def read_header(file: Path) -> dict[str, dict]:
    """The header of a safetensors file: tensor name → {dtype, shape, data_offsets}.

    Raises:
        CheckpointError: the file is truncated or not a safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{file} is truncated: its header needs {length} bytes, the file has {size}", "re-download this file"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file} is not a safetensors file: {error}", "re-download this file") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise CheckpointError(
            f"{file} is truncated: it should have {8 + length + end} bytes and has {size}", "re-download this file"
        )
    return header


def check_checkpoint(folder: Path) -> None:
    """Check all safetensors files of a local checkpoint; a `folder` that is none (a hub id) has nothing to check.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    for file in safetensors_files(folder):
        read_header(file)
