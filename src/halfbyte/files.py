"""Where what can be made again is kept; and writing without loss: aside, flushed to disk, and renamed into place.

A reader never sees a half-written file, and a crash (or a full disk) leaves the previous version untouched.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import ConfigError, TrainingError


def cache_folder() -> Path:
    """Where built kernels, unpacked models and the demo's base are kept: $HALFBYTE_CACHE, else the user's cache folder.

    Raises:
        ConfigError: there is neither. What is loaded from a folder for everybody's temporary files could be anybody's.
    """
    try:
        if chosen := os.environ.get("HALFBYTE_CACHE"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfbyte"
    except RuntimeError as error:  # as in containers that run under a number alone
        raise ConfigError("this user has no home folder", "set HALFBYTE_CACHE to one for caches") from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` to `path` atomically (UTF-8), making parent directories.

    Raises:
        TrainingError: the disk is full or the directory cannot be written; `path` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror}", "free some space and run again") from error
    finally:
        Path(aside).unlink(missing_ok=True)
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON, atomically."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check_space(path: Path | str, needed: int, fix: str) -> None:
    """Whether what takes `needed` bytes can be written to `path`.

    Raises:
        TrainingError: its disk has fewer bytes free.
    """
    place = next(parent for parent in Path(path).absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise TrainingError(
            f"no space for {path}: it takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free", fix
        )


@contextlib.contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yield a directory beside `path` to fill; on success it is synced and renamed to `path`, replacing a former one.

    On any error the half-filled directory is removed and a former `path` stays.

    Raises:
        TrainingError: the disk is full or the place cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    former = aside.with_name(aside.name + ".former")
    try:
        os.chmod(aside, 0o755)
        yield aside
        for entry in sorted(aside.rglob("*")):
            if entry.is_file():
                with open(entry, "rb") as file:
                    os.fsync(file.fileno())
        if path.exists():
            os.replace(path, former)
        os.replace(aside, path)
        _sync_directory(path.parent)
    except OSError as error:
        if former.exists() and not path.exists():
            os.replace(former, path)
        raise TrainingError(f"cannot write {path}: {error}", "free some space and run again") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Yield a path beside `path` to write; on success that file is synced and renamed to `path`.

    On any error it is removed and a former `path` stays.

    Raises:
        TrainingError: the disk is full or the place cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(descriptor)
        aside = Path(name)
        try:
            yield aside
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
            os.chmod(aside, 0o644)
            os.replace(aside, path)
            _sync_directory(path.parent)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise TrainingError(f"cannot write {path}: {error.strerror}", "free some space and run again") from error
