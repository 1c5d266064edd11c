"""Cache folder, and atomic writes: to a temporary path, flushed to disk, and renamed.

Readers never see a partial file, and a crash or a full disk leaves the previous version intact. The temporary path is
in the target's folder, with a name that identifies its process: `.NAME.halfbyte-MACHINE-PID-SINCE-NUMBER.new`. If that
process ends without removing it, the next one that writes into the folder does.
"""

import contextlib
import errno
import itertools
import json
import os
import re
import resource
import shutil
import time
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from .errors import ConfigError, HalfbyteError, TrainingError, explain_os_error
from .notices import notice
from .processes import Process


def cache_folder() -> Path:
    """Return the folder for built kernels, compiled Python, unpacked models and the demo's base: $HALFBYTE_CACHE, or
    the user's cache folder.

    Raises:
        ConfigError: there is neither. Shared temporary folders are not used, since other users could plant files there.
    """
    try:
        if chosen := os.environ.get("HALFBYTE_CACHE"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfbyte"
    except RuntimeError as error:  # as for a container's UID without an account
        raise ConfigError("this user has no home folder", "set HALFBYTE_CACHE to one for caches") from error


# --- temporary paths and leftovers ----------------------------------------------------------------------------------

NEW, FORMER = "new", "former"  # being written or removed; the previous version while it is replaced
ABANDONED_AFTER = 86400.0  # seconds without a change, for leftovers of other machines
_OWNER = rf"\.halfbyte-([0-9a-f]{{8}})-(\d+)-(\d+)-\d+\.({NEW}|{FORMER})"
_NAME = re.compile(rf"\.(.+){_OWNER}")
_IN_TEXT = re.compile(rf"(?<![^/\s'\"(])\.([^/\n]+?){_OWNER}")
_numbers = itertools.count()


class TemporaryPath(NamedTuple):
    """A temporary path in its target's folder.

    Attributes:
        path: the temporary path.
        target: the path that it will be renamed to, or was renamed from.
        owner: the process that made it.
        role: NEW or FORMER.
    """

    path: Path
    target: Path
    owner: Process
    role: str

    @classmethod
    def parse(cls, path: Path) -> "TemporaryPath | None":
        """Parse the name of `path`; None if it is not temporary."""
        if match := _NAME.fullmatch(path.name):
            name, machine, pid, since, role = match.groups()
            return cls(path, path.with_name(name), Process(machine, int(pid), int(since)), role)
        return None

    @property
    def is_abandoned(self) -> bool:
        """Whether its process has ended."""
        running = self.owner.is_running
        if running is None:
            entries = [self.path, *self.path.rglob("*")]
            return max(entry.lstat().st_mtime for entry in entries) < time.time() - ABANDONED_AFTER
        return not running


def temporary_path(path: Path, role: str = NEW) -> Path:
    """Return an unused temporary path for `path`, with this process's identity."""
    machine, pid, since = Process.current()
    return path.with_name(f".{path.name}.halfbyte-{machine}-{pid}-{since}-{next(_numbers)}.{role}")


def with_target_names(text: str) -> str:
    """Replace temporary names in `text` by those of their targets."""
    return _IN_TEXT.sub(r"\1", text)


def clear_leftovers(folder: Path) -> None:
    """Remove unfinished files of ended processes in `folder`, and restore versions that one was about to replace.

    What cannot be removed is silently left there.
    """
    with contextlib.suppress(OSError):
        hidden = (path for path in folder.iterdir() if path.name.startswith("."))
        leftovers = [temporary for path in hidden if (temporary := TemporaryPath.parse(path))]
        # FORMER first: it may be the only version
        for temporary in sorted(leftovers, key=attrgetter("role")):
            with contextlib.suppress(OSError):
                if temporary.is_abandoned:
                    _clear(temporary)


def _clear(temporary: TemporaryPath) -> None:
    owner = f"process {temporary.owner.pid}, which ended before it was done"
    if temporary.role == FORMER and not os.path.lexists(temporary.target):
        os.replace(temporary.path, temporary.target)
        notice(f"leftover {temporary.path}", f"restored {temporary.target}, which was being replaced by {owner}")
        return
    remove(temporary.path)
    if temporary.role == NEW:
        notice(f"leftover {temporary.path}", f"removed an unfinished {temporary.target} of {owner}")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; a folder is renamed first, so that no partial folder is visible."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not TemporaryPath.parse(path):
        path = path.rename(temporary_path(path))
    shutil.rmtree(path)


# --- writing ---------------------------------------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT)
FIXES = {
    **dict.fromkeys(FULL, "free some space on its disk, and run the command again, with --resume if it trains"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name a folder on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "remove it, or name another path",
    errno.EIO: "check the disk, and run again",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
DEFAULT_FIX = "name a folder that you may write to"
ERRNO_TEXT = {
    errno.EACCES: "you may not write there",
    errno.ENOENT: "no file can be made there",
    errno.EEXIST: "a file has the name of a needed folder",
}
WRITE_ERRNOS = (*FULL, errno.EFBIG, errno.EROFS, errno.EIO)  # errors that reading cannot cause
_RUST = re.compile(r"\(os error (\d+)\)")  # in messages of safetensors and tokenizers
_NUMPY = re.compile(r"\d+ requested and \d+ written")  # the whole message


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn exceptions of the code that writes `path`, libraries included, into errors with the path, cause and fix.

    Raises:
        TrainingError: the path cannot be written.
        HalfbyteError: as raised, with the target instead of a temporary path.
    """
    path = Path(path)
    try:
        yield
    except HalfbyteError as error:
        if with_target_names(error.message) == error.message:
            raise
        raise type(error)(with_target_names(error.message), with_target_names(error.fix)) from error
    except Exception as error:
        cause = _cause(error, path)
        if cause is None:
            raise
        raise TrainingError(*write_problem(path, cause)) from error


def write_problem(path: Path | str, cause: OSError) -> tuple[str, str]:
    """Return the message and the fix for a path that cannot be written."""
    number = cause.errno or 0
    return f"cannot write {path}: {ERRNO_TEXT.get(number) or explain_os_error(cause)}", FIXES.get(number, DEFAULT_FIX)


def _cause(error: BaseException, path: Path) -> OSError | None:
    """Return the OSError of writing `path` behind a library's exception; None if it is about something else."""
    if isinstance(error, OSError) and error.errno:
        named = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        named_path, path = Path(with_target_names(str(Path(named).absolute()))), path.absolute()
        return error if named_path.is_relative_to(path) or path.is_relative_to(named_path) else None
    if _NUMPY.fullmatch(str(error)):
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        number = errno.EFBIG if limited else errno.ENOSPC
        return OSError(number, os.strerror(number))
    if (match := _RUST.search(str(error))) and int(match[1]) in WRITE_ERRNOS:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    cause = error.__context__  # torch raises its own error for a Python file that cannot be written
    return cause if isinstance(cause, OSError) and cause.errno in WRITE_ERRNOS else None


@contextlib.contextmanager
def remove_unused_folders(path: Path) -> Iterator[None]:
    """Remove on exit the folders of `path` that did not exist before and are empty."""
    new_folders = [folder for folder in (path.absolute(), *path.absolute().parents) if not folder.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # keep folders with content
            for folder in new_folders:
                folder.rmdir()


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Make the folder, clear leftovers and yield a temporary path, removed on exit like new empty folders."""
    temporary = temporary_path(path)
    with remove_unused_folders(path.parent):
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                clear_leftovers(path.parent)
                yield temporary
        finally:
            with contextlib.suppress(OSError):
                remove(temporary)


@contextlib.contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yield a temporary directory to fill; on success it is synced and renamed to `path`, replacing a previous version.

    On any error it is removed and a previous `path` is unchanged.

    Raises:
        TrainingError: the disk is full or the path cannot be written.
    """
    path = Path(path)
    former = temporary_path(path, FORMER)
    with _temporary(path) as temporary:
        temporary.mkdir()
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # by the umask, which some libraries ignore
        for entry in sorted(temporary.rglob("*")):
            if entry.is_file():
                _sync_file(entry, mode)
        try:
            if os.path.lexists(path):
                os.replace(path, former)
            os.replace(temporary, path)
        finally:
            if os.path.lexists(former) and not os.path.lexists(path):
                os.replace(former, path)
        _sync_directory(path.parent)
        remove(former)


@contextlib.contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Yield an empty temporary file to write; on success it is synced and renamed to `path`.

    On any error it is removed and a previous `path` is unchanged.

    Raises:
        TrainingError: the disk is full or the path cannot be written.
    """
    path = Path(path)
    with _temporary(path) as temporary:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode & 0o777
        yield temporary
        _sync_file(temporary, mode)
        os.replace(temporary, path)
        _sync_directory(path.parent)


def _sync_file(path: Path, mode: int) -> None:
    """Flush a file to disk and set its mode."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    if path.stat().st_mode & 0o777 != mode:
        path.chmod(mode)


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # the rename has succeeded, and a folder may not be readable
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` to `path` atomically as UTF-8, making parent directories; lone surrogates are escaped as in JSON.

    Raises:
        TrainingError: the disk is full or the directory cannot be written; `path` is unchanged.
    """
    path = Path(path)
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON, atomically."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check_space(path: Path | str, needed: int, fix: str) -> None:
    """Check that `needed` bytes can be written to `path`.

    Raises:
        TrainingError: its disk has fewer bytes free.
    """
    from .text import size

    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    disk = shutil.disk_usage(folder)
    if disk.free < needed and disk.total:  # /proc and the like report no size; writing raises an error
        raise TrainingError(f"no space for {path}: it needs {size(needed)}, and {size(disk.free)} are free", fix)
