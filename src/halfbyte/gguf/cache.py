"""Cache of imported GGUF files: a GGUF file named as a model is imported once, into a folder that all commands read.

A run reads its base several times (training, merging, verifying), and decoding is slow.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..utils.errors import ConfigError, ModelError
from ..utils.files import cache_folder

SUFFIX = ".gguf"
VERSION = 2  # of `importer.import_gguf`'s output; increment it with every change of that, to import files again


def checkpoint_folder(name_or_path: str, keep: bool = False) -> str:
    """Return the checkpoint folder of a model: `name_or_path` itself, or the folder of an imported GGUF file.

    The first call for a GGUF file imports it, which may take minutes. The folder is in the cache; its name depends on
    the file's path, size and modification time, on `VERSION` and on `keep`.

    Args:
        keep: store linear layers in the file's own types.

    Raises:
        ConfigError: the gguf library is missing, no layer can be stored as in the file, or there is no cache folder.
        ModelError, CheckpointError, TrainingError: see `importer.import_gguf`.
    """
    path = gguf_file(name_or_path, keep)
    if path is None:
        return name_or_path
    status = path.stat()
    key = hashlib.sha256(f"{VERSION} {path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder() / "gguf" / f"{path.stem}-{key}{'-keep' if keep else ''}"
    if not folder.is_dir():
        try:
            from .importer import import_gguf
        except ModuleNotFoundError as error:
            raise ConfigError(f"{path}: GGUF files need the gguf library", "pip install 'halfbyte[gguf]'") from error
        import_gguf(path, folder, keep=keep)
    return str(folder)


def gguf_file(name_or_path: str, keep: bool = False) -> Path | None:
    """Return the path of a GGUF file; None if `name_or_path` names something else.

    Raises:
        ConfigError: `keep` is set for another kind of model.
        ModelError: the file does not exist.
    """
    if not name_or_path.endswith(SUFFIX):
        if keep:
            raise ConfigError(
                f"quantization: keep is for GGUF files, and {name_or_path} is not one",
                "remove it: quantized checkpoints keep their formats without it",
            )
        return None
    path = Path(name_or_path).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {path}", "name a GGUF file, a model's folder or a hub id")
    return path
