"""Readers of external files: the kind of a path, bytes and text."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Literal, TextIO, cast

from ..utils.errors import ConfigError, HalfbyteError, explain_os_error

MEBIBYTE = 2**20
LARGEST_TEXT = 256 * MEBIBYTE  # largest file to read at once; the largest tokenizer.json has 33 MiB

_FIXES = {
    errno.EACCES: "give yourself the right to (chmod u+rX), or name another",
    errno.EPERM: "give yourself the right to, or name another",
    errno.EISDIR: "name a file",
    errno.ENOTDIR: "check the path",
    errno.ENAMETOOLONG: "check the name",
    errno.ELOOP: "repair the link, or name the file itself",
    errno.EMFILE: "raise the limit (ulimit -n)",
}
_KINDS = {
    stat.S_IFIFO: ("it is a pipe, not a file", "write what comes through it to a file, and name that"),
    stat.S_IFSOCK: ("it is a socket, not a file", "name a file"),
    stat.S_IFCHR: ("it is a device, not a file", "name a file"),
    stat.S_IFBLK: ("it is a device, not a file", "name a file"),
}
_POINTER, _LARGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024
_BOMS = {b"\xff\xfe\0\0": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def same_place(first: str, second: str) -> bool:
    """Return whether two names are equal or refer to the same folder."""
    return first == second or (os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second))


def look(path: Path | str, error: type[HalfbyteError] = ConfigError, fix: str = "") -> Literal["file", "folder", ""]:
    """Return the kind of `path`: "file", "folder", or "" if nothing is there.

    Args:
        fix: the fix for an inaccessible path whose cause has no fix of its own.

    Raises:
        error: the path is unreadable: a pipe, a device, a link to nothing or to itself, or a name that is too long.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.islink(path):
            return ""
        raise error(
            f"{path} is a link to {os.readlink(path)}, which is not there", "repair the link, or name the file itself"
        ) from None
    except OSError as problem:
        raise error(f"cannot read {path}: {explain_os_error(problem)}", _FIXES.get(problem.errno or 0, fix)) from None
    except ValueError:  # NUL, or half a surrogate pair
        raise error(f"cannot read {path}: the name holds a character that no file's name has", "check the name") from (
            None
        )
    file_type = stat.S_IFMT(mode)
    if file_type in _KINDS:
        problem_text, remedy = _KINDS[file_type]
        raise error(f"cannot read {path}: {problem_text}", remedy)
    return "folder" if file_type == stat.S_IFDIR else "file"


@contextlib.contextmanager
def open_bytes(path: Path | str, error: type[HalfbyteError] = ConfigError, fix: str = "") -> Iterator[BufferedReader]:
    """Open the file at `path` for reading; OSErrors while it is open become `error`.

    Raises:
        error: there is no such file, or it cannot be read.
    """
    with _open(path, error, fix, "rb") as file:
        yield cast(BufferedReader, file)


@contextlib.contextmanager
def open_text(
    path: Path | str, error: type[HalfbyteError] = ConfigError, fix: str = "", newline: str | None = None
) -> Iterator[TextIO]:
    """Open the UTF-8 text file at `path` for reading, without a byte order mark.

    Raises:
        error: there is no such file, it cannot be read, or it is not UTF-8 (with line and byte).
    """
    with _open(path, error, fix, "r", newline) as file:
        try:
            yield cast(TextIO, file)
        except UnicodeDecodeError:
            raise _undecodable(Path(path), error) from None


@contextlib.contextmanager
def _open(
    path: Path | str, error: type[HalfbyteError], fix: str, mode: str, newline: str | None = None
) -> Iterator[object]:
    path_type = look(path, error, fix)
    if not path_type:
        raise error(f"no such file: {path}", fix)
    if path_type == "folder":
        raise error(f"cannot read {path}: it is a folder", _FIXES[errno.EISDIR])
    try:
        if _is_pointer(path):
            raise error(f"{path} is a Git LFS pointer, not the file", "fetch it: `git lfs pull` in its folder")
        with open(path, mode, encoding=None if "b" in mode else "utf-8-sig", newline=newline) as file:
            yield file
    except OSError as problem:
        raise error(
            f"cannot read {path}: {explain_os_error(problem)}", _FIXES.get(problem.errno or 0, fix)
        ) from problem


def _is_pointer(path: Path | str) -> bool:
    """Return whether the file is a Git LFS pointer, as after a clone without LFS."""
    if os.stat(path).st_size > _LARGEST_POINTER:
        return False
    with open(path, "rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def _undecodable(path: Path, error: type[HalfbyteError]) -> HalfbyteError:
    """Build the error that names the first line and byte that are not UTF-8."""
    with open(path, "rb") as file:
        start = file.read(4)
        if name := next((name for mark, name in _BOMS.items() if start.startswith(mark)), ""):
            return error(f"{path} is {name}, not UTF-8", "save the file as UTF-8")
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as problem:
                problem_text = f"byte {problem.start + 1} of the line, 0x{line[problem.start]:02x}, is not UTF-8"
                return error(f"{path}:{number}: {problem_text}", "save the file as UTF-8")
    return error(f"{path} is not UTF-8", "save the file as UTF-8")


def read_text(
    path: Path | str, error: type[HalfbyteError] = ConfigError, fix: str = "", largest: int = LARGEST_TEXT
) -> str:
    """Read the text of the file at `path`, UTF-8 with or without a byte order mark.

    Args:
        error: class of the error.
        fix: the fix for a missing or malformed file.
        largest: largest size in bytes.

    Raises:
        error: there is no such file, it cannot be read, is too large, or is not UTF-8 (with line and byte).
    """
    with open_text(path, error, fix) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            sizes = f"{size / MEBIBYTE:,.0f} MiB, more than the {largest / MEBIBYTE:,.0f} that such a file may have"
            raise error(f"{path} has {sizes}", fix or "name another file")
        return file.read()
