"""Readers for weight files: names of the files, headers, and tensors, of models, adapters and pickled state.

Names and headers need only the standard library. No file read here can run code.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import CheckpointError
from ..utils.hardware import is_out_of_memory
from .boundary import answered
from .files import MEBIBYTE, look, open_bytes
from .json import parse_json, read_json
from .model_config import CONFIG, GENERATION, check_model_config

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # as PEFT saves them
OVERRIDES = "config_overrides.json"  # in an adapter's folder: keys that replace those of the base's config.json
ADAPTER_PICKLED = "adapter_model.bin"
LARGEST_HEAD = 32 * MEBIBYTE  # of JSON that lists 250,000 tensors
MOST_RANKS = 65_536
DIGEST_BLOCK = 256 * MEBIBYTE  # of a file, read by one thread
DIGEST_THREADS = 8
AGAIN = "re-download this file"
ADAPTER_AGAIN = "copy the adapter there again"
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64), **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16), **dict.fromkeys(("U8", "I8", "BOOL"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


# --- names of files ---------------------------------------------------------------------------------------------------


def check_checkpoint(folder: Path) -> None:
    """Check a local checkpoint: its config, its index and the headers of its weights. Hub ids are not checked.

    Raises:
        CheckpointError: the missing or damaged file, or the invalid key.
    """
    if not folder.is_dir():
        return
    check_model_config(folder)
    for file in safetensors_files(folder):
        read_header(file)


def safetensors_files(folder: Path) -> list[Path]:
    """List the safetensors files of a local checkpoint, in order; empty if it has none.

    Raises:
        CheckpointError: the index is damaged, or names a file that is not there or not in this folder.
    """
    return _files(folder, SINGLE, INDEX)


def pickled_files(folder: Path) -> list[Path]:
    """List the pickled weight files (pytorch_model.bin), which transformers reads if there are no others."""
    return _files(folder, PICKLED, PICKLED_INDEX)


def checkpoint_digest(path: Path) -> str:
    """Return a digest (XXH3, 128 bits) of a local checkpoint: config, code, index, and every byte of the weights.

    Blocks are read by several threads. It detects changes, but is no protection against forgery.

    Args:
        place: a folder, or a GGUF file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    import xxhash

    files = [path]
    if not path.is_file():
        described = [path / name for name in (CONFIG, GENERATION, INDEX, PICKLED_INDEX)] + sorted(path.glob("*.py"))
        files = [file for file in described if look(file, CheckpointError, AGAIN) == "file"]
        files += safetensors_files(path) or pickled_files(path)
    blocks = [(file, at) for file in files for at in range(0, os.path.getsize(file), DIGEST_BLOCK)]
    digest = xxhash.xxh3_128(repr([os.path.getsize(file) for file in files]).encode())
    with ThreadPoolExecutor(min(DIGEST_THREADS, os.cpu_count() or 1)) as pool:
        for block_digest in pool.map(_block_digest, blocks):
            digest.update(block_digest)
    return digest.hexdigest()


def _block_digest(block: tuple[Path, int]) -> bytes:
    """Return the digest of `DIGEST_BLOCK` bytes of a file from an offset; the file's last block may be shorter."""
    import xxhash

    file, start = block
    digest = xxhash.xxh3_128()
    left = DIGEST_BLOCK
    with open_bytes(file, CheckpointError, AGAIN) as stream:
        stream.seek(start)
        while left and (data := stream.read(min(left, 4 * MEBIBYTE))):
            digest.update(data)
            left -= len(data)
    return digest.digest()


def _files(folder: Path, single: str, index: str) -> list[Path]:
    if look(folder / single, CheckpointError, AGAIN) == "file":  # transformers prefers it to an index, too
        return [folder / single]
    if not look(folder / index, CheckpointError, AGAIN):
        return []
    document = read_json(folder / index, CheckpointError, "re-download the index", LARGEST_HEAD)
    fields = document if isinstance(document, dict) else {}
    shards = fields.get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{folder / index} has no weight_map of tensors to files", "re-download the index")
    if not isinstance(fields.get("metadata"), dict):
        raise CheckpointError(f"{folder / index} has no metadata, which transformers requires", "re-download the index")
    names = sorted(set(shards.values()))
    for name in names:
        # Links are allowed, because the hub's cache consists of them. The index is downloaded, so its names must not
        # leave the folder.
        if os.path.basename(name) != name or "\\" in name or not name.endswith(os.path.splitext(single)[1]):
            raise CheckpointError(
                f"{folder / index}: {name!r} is not a weight file in this folder", "re-download the checkpoint"
            )
        if look(folder / name, CheckpointError, AGAIN) != "file":
            raise CheckpointError(f"{folder / name} is missing, though {index} names it", "re-download the checkpoint")
    return [folder / name for name in names]


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read and check adapter_config.json of a local folder.

    Raises:
        CheckpointError: it is missing, unreadable or invalid.
    """
    path = folder / ADAPTER_CONFIG
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file, not an adapter's folder", f"name {folder.parent}")
    if not look(path, CheckpointError, ADAPTER_AGAIN):
        of_run = folder / "adapter"  # for a run's folder
        fix = f"name {of_run}" if (of_run / ADAPTER_CONFIG).exists() else "name a folder that PEFT saved"
        raise CheckpointError(f"{folder} has no {ADAPTER_CONFIG}", fix)
    document = read_json(path, CheckpointError, ADAPTER_AGAIN)
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, not an object", ADAPTER_AGAIN)
    pickled = folder / ADAPTER_PICKLED
    if pickled.exists() and not (folder / ADAPTER).exists():
        fix = "if you trust it, load it with PEFT and save it again as safetensors"
        raise CheckpointError(f"{pickled} is a pickle, which could run code and is not read", fix)
    for keys, (sound, expected) in ADAPTER_KINDS.items():
        for key in keys:
            if key in document and not document[key] and document.get("peft_type") in WITHOUT_RANK:
                continue
            if key in document and not sound(document[key]) and (document[key] is not None or key in NOT_NULL):
                raise CheckpointError(f"{path}: {key} must be {expected}, not {document[key]!r:.80}", ADAPTER_AGAIN)
    return document


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MOST_RANKS


def _rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= MOST_RANKS


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


def _mapping_to(sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(sound, value.values()))


WITHOUT_RANK = ("OFT", "SUPERTUNING")  # types of PEFT's whose `r` may be 0 or null
NOT_NULL = ("r", "lora_alpha", "lora_dropout")  # in adapter_config.json; PEFT computes with them
ADAPTER_KINDS: dict[tuple[str, ...], tuple[Callable[[Any], bool], str]] = {
    ("r",): (_rank, f"a whole number from 1 to {MOST_RANKS}"),
    ("lora_alpha", "lora_dropout"): (_number, "a number"),
    ("rank_pattern",): (_mapping_to(_rank), "a mapping from names to ranks"),
    ("alpha_pattern",): (_mapping_to(_number), "a mapping from names to numbers"),
    ("target_modules", "modules_to_save", "exclude_modules"): (_names, "names of modules"),
    ("base_model_name_or_path", "revision", "peft_type", "task_type"): (lambda value: isinstance(value, str), "text"),
}


# --- headers ----------------------------------------------------------------------------------------------------------


def read_header(file: Path, fix: str = AGAIN) -> dict[str, dict[str, Any]]:
    """Read the header of a safetensors file: tensor name → {dtype, shape, data_offsets}.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or is not a safetensors file.
    """
    with open_bytes(file, CheckpointError, fix) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if not size:
            raise CheckpointError(f"{file} is truncated: it is empty", fix)
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is truncated: its header needs {length} bytes, the file has {size}", fix)
        if length > LARGEST_HEAD:
            limit = LARGEST_HEAD // MEBIBYTE
            raise CheckpointError(f"{file} has a header of {length // MEBIBYTE} MiB, more than {limit}", fix)
        text = stream.read(length)
    header = parse_json(text, f"{file} is not a safetensors file: header", CheckpointError, fix, unique=True)
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is not a safetensors file: its header is not an object", fix)
    described = header.pop("__metadata__", None) or {}
    if not isinstance(described, dict) or not all(isinstance(value, str) for value in described.values()):
        raise CheckpointError(f"{file}: __metadata__ must be a mapping to text", fix)
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(file, item[0], item[1], fix)):
        nbytes = _nbytes(file, name, entry, fix)
        if entry["data_offsets"] != [end, end + nbytes]:
            first, last = entry["data_offsets"]
            raise CheckpointError(
                f"{file}: {name} must have the bytes {end} to {end + nbytes}, not {first} to {last}", fix
            )
        end += nbytes
    if 8 + length + end != size:
        raise CheckpointError(f"{file} is truncated: it should have {8 + length + end} bytes and has {size}", fix)
    return header


def _offsets(file: Path, name: str, entry: Any, fix: str) -> tuple[int, int]:
    """Return the first and last byte of a tensor, the sort key of entries."""
    offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: {name} has no data_offsets of two numbers", fix)
    return offsets[0], offsets[1]


def _nbytes(file: Path, name: str, entry: dict[str, Any], fix: str) -> int:
    if not isinstance(entry.get("dtype"), str) or entry["dtype"] not in BITS:
        raise CheckpointError(f"{file}: {name} has the unknown dtype {entry.get('dtype')!r}", fix)
    if not _counts(entry.get("shape")):
        raise CheckpointError(f"{file}: {name} has the shape {entry.get('shape')!r}", fix)
    return math.prod(entry["shape"]) * BITS[entry["dtype"]] // 8


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


# --- tensors ---------------------------------------------------------------------------------------------------------


def read_tensors(file: Path, fix: str = AGAIN) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file to the CPU.

    Raises:
        CheckpointError: as `read_header`.
    """
    from safetensors.torch import load_file

    read_header(file, fix)
    with answered(f"cannot read {file}", fix):
        return load_file(file)


def read_tensor(file: Path, name: str) -> Tensor:
    """Read one tensor of a file with a checked header to the CPU.

    Raises:
        CheckpointError: it cannot be read.
    """
    from safetensors import safe_open

    with answered(f"cannot read {name} of {file}", AGAIN), safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def read_state(file: Path, fix: str, device: str = "cpu", fix_of_pickles: str = "") -> Any:
    """Read tensors, numbers, text and their containers from a torch.save file, without running code.

    Args:
        device: "meta" reads shapes only.
        fix_of_pickles: the fix for other contents; default: `fix`.

    Raises:
        CheckpointError: it is damaged, or has other contents.
    """
    import torch

    with open_bytes(file, CheckpointError, fix):
        pass
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is damaged, or holds more than tensors: a pickle that could run code is not loaded",
            fix_of_pickles or fix,
        ) from error
    except Exception as error:  # of several classes, with messages about torch's internals
        if is_out_of_memory(error):
            raise
        raise CheckpointError(f"{file} is truncated or damaged", fix) from error
