"""GGUF files that are named as models: each is unpacked once, into a folder that everything else reads.

A run reads its base several times (training, merging, verifying), and decoding is slow, so what was decoded is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from ..utils.errors import ConfigError, ModelError
from ..utils.files import cache_folder

SUFFIX = ".gguf"
VERSION = 1  # of what `unpack.import_gguf` writes: raise it with every change of it, so that files are unpacked again


def checkpoint_folder(name_or_path: str, keep: bool = False) -> str:
    """`name_or_path`, unless it is a GGUF file: then the folder that it is unpacked in, which may take minutes once.

    With `keep` that is another folder, whose linear layers are stored as in the file.

    The folder is in the cache, under a name that depends on the file's place, size and time of change, and on
    `VERSION`.

    Raises:
        ConfigError: the gguf library is missing, there is nothing to keep, or there is no cache.
        ModelError, CheckpointError, TrainingError: see `unpack.import_gguf`.
    """
    path = gguf_file(name_or_path, keep)
    if path is None:
        return name_or_path
    facts = path.stat()
    key = hashlib.sha256(f"{VERSION} {path.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}{'-keep' if keep else ''}"
    if not folder.is_dir():
        try:
            from .unpack import import_gguf
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path}: GGUF files need the gguf library", "pip install 'halfbyte[gguf]'") from error
        import_gguf(path, folder, keep=keep)
    return str(folder)


def gguf_file(name_or_path: str, keep: bool = False) -> Path | None:
    """The GGUF file of that name; None where the name is of something else.

    Raises:
        ConfigError: there is nothing to keep.
        ModelError: the file is not there.
    """
    if not name_or_path.endswith(SUFFIX):
        if keep:
            raise ConfigError(
                f"quantization: keep is of GGUF files, and {name_or_path} is none",
                "remove it: checkpoints that were quantized before are kept as they are",
            )
        return None
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {path}", "name a GGUF file, a model's folder or a hub id")
    return path


def in_words(types: Mapping[str, int]) -> str:
    """Numbers of linear layers by the file's names of their types: "14 Q4_0, 2 Q6_K"."""
    return ", ".join(f"{count} {name}" for name, count in types.items()) or "none"
