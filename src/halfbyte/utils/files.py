"""Where what can be made again is kept; and writing without loss: aside, flushed to disk, and renamed into place.

A reader never sees a half-written file, and a crash (or a full disk) leaves the previous version untouched. What is
written lies beside its place, under a name that says whose it is: `.NAME.halfbyte-MACHINE-PID-SINCE-NUMBER.new`. Where
its process has ended without removing it, the next one that writes into that folder does.
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
from pathlib import Path
from typing import Any, NamedTuple

from ..reading import why
from .errors import ConfigError, HalfbyteError, TrainingError
from .notices import notice
from .processes import Process


def cache_folder() -> Path:
    """Where built kernels, compiled Python, unpacked models and the demo's base are kept: $HALFBYTE_CACHE, else the
    user's cache folder.

    Raises:
        ConfigError: there is neither. What is loaded from a folder for everybody's temporary files could be anybody's.
    """
    try:
        if chosen := os.environ.get("HALFBYTE_CACHE"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "halfbyte"
    except RuntimeError as error:  # as in containers that run under a number alone
        raise ConfigError("this user has no home folder", "set HALFBYTE_CACHE to one for caches") from error


# --- what a killed process leaves ------------------------------------------------------------------------------------

NEW, FORMER = "new", "former"  # being written or removed; what was there until its successor came
A_DAY = 86400.0  # seconds without a change, after which another machine's process is taken to have ended
_WHOSE = rf"\.halfbyte-([0-9a-f]{{8}})-(\d+)-(\d+)-\d+\.({NEW}|{FORMER})"
_NAME = re.compile(rf"\.(.+){_WHOSE}")
_IN_TEXT = re.compile(rf"(?<![^/\s'\"(])\.([^/\n]+?){_WHOSE}")
_numbers = itertools.count()


class Aside(NamedTuple):
    """Something that lies beside its place.

    Attributes:
        path: where it is.
        target: its place.
        maker: whose it is.
        kind: NEW or FORMER.
    """

    path: Path
    target: Path
    maker: Process
    kind: str

    @classmethod
    def of(cls, path: Path) -> "Aside | None":
        """What `path` says by its name; None for anything else."""
        if found := _NAME.fullmatch(path.name):
            name, machine, pid, since, kind = found.groups()
            return cls(path, path.with_name(name), Process(machine, int(pid), int(since)), kind)
        return None

    @property
    def is_left(self) -> bool:
        """Whether its process has ended."""
        runs = self.maker.runs
        if runs is None:
            entries = [self.path, *self.path.rglob("*")]
            return max(entry.lstat().st_mtime for entry in entries) < time.time() - A_DAY
        return not runs


def aside_of(path: Path, kind: str = NEW) -> Path:
    """A name beside `path` that nothing has, and that says whose it is."""
    machine, pid, since = Process.this()
    return path.with_name(f".{path.name}.halfbyte-{machine}-{pid}-{since}-{next(_numbers)}.{kind}")


def shown(text: str) -> str:
    """`text` with the names of places instead of those aside."""
    return _IN_TEXT.sub(r"\1", text)


def clear_leftovers(folder: Path) -> None:
    """Remove what processes that have ended left unfinished in `folder`, and put back what one was about to replace.

    What cannot be removed stays, without a word: nothing depends on it.
    """
    with contextlib.suppress(OSError):
        found = [aside for path in folder.iterdir() if path.name.startswith(".") and (aside := Aside.of(path))]
        for aside in sorted(found, key=lambda aside: aside.kind):  # FORMER first: it may be the only one there is
            with contextlib.suppress(OSError):
                if aside.is_left:
                    _clear(aside)


def _clear(aside: Aside) -> None:
    whose = f"process {aside.maker.pid}, which ended before it was done"
    if aside.kind == FORMER and not os.path.lexists(aside.target):
        os.replace(aside.path, aside.target)
        notice(f"leftover {aside.path}", f"{aside.target} is back as it was: it was being replaced by {whose}")
        return
    remove(aside.path)
    if aside.kind == NEW:
        notice(f"leftover {aside.path}", f"removed what was left of {aside.target} by {whose}")


def remove(path: Path) -> None:
    """Remove a file, a link or a folder; a folder is renamed first, so that it is never half there."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if not Aside.of(path):
        path = path.rename(aside_of(path))
    shutil.rmtree(path)


# --- writing ---------------------------------------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT)
FIXES = {
    **dict.fromkeys(FULL, "free some space on its disk, and run again"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), or name a folder on another disk",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EISDIR: "remove it, or name another place",
    errno.EIO: "check the disk, and run again",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}
WRITE_TO = "name a folder that you may write to"
WORDS = {
    errno.EACCES: "you may not write there",
    errno.ENOENT: "no file can be made there",
    errno.EEXIST: "a file stands where a folder is needed",
}
OF_WRITING = (*FULL, errno.EFBIG, errno.EROFS, errno.EIO)  # what cannot be of a file that is only read
_RUST = re.compile(r"\(os error (\d+)\)")  # safetensors and tokenizers say so
_NUMPY = re.compile(r"\d+ requested and \d+ written")  # says no more


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Around whatever writes `path`, libraries too: what fails names it, says why, and what to do.

    Raises:
        TrainingError: it cannot be written.
        HalfbyteError: as raised, with `path` where it named what lies aside.
    """
    path = Path(path)
    try:
        yield
    except HalfbyteError as error:
        if shown(error.message) == error.message:
            raise
        raise type(error)(shown(error.message), shown(error.fix)) from error
    except Exception as error:
        cause = _cause(error, path)
        if cause is None:
            raise
        raise TrainingError(*refusal(path, cause)) from error


def refusal(path: Path | str, cause: OSError) -> tuple[str, str]:
    """What is said of a place that cannot be written, and the fix."""
    number = cause.errno or 0
    return f"cannot write {path}: {WORDS.get(number) or why(cause)}", FIXES.get(number, WRITE_TO)


def _cause(error: BaseException, path: Path) -> OSError | None:
    """What the system said to who wrote `path`, out of what a library made of it; None: it is about something else."""
    if isinstance(error, OSError) and error.errno:
        named = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
        place, path = Path(shown(str(Path(named).absolute()))), path.absolute()
        return error if place.is_relative_to(path) or path.is_relative_to(place) else None
    if _NUMPY.fullmatch(str(error)):
        limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
        number = errno.EFBIG if limited else errno.ENOSPC
        return OSError(number, os.strerror(number))
    if (found := _RUST.search(str(error))) and int(found[1]) in OF_WRITING:
        return OSError(int(found[1]), os.strerror(int(found[1])))
    before = error.__context__  # torch's own error for a Python file that could not be written
    return before if isinstance(before, OSError) and before.errno in OF_WRITING else None


@contextlib.contextmanager
def new_folders(path: Path) -> Iterator[None]:
    """Folders of `path` that were not there before, and in which nothing was written, go again."""
    made = [folder for folder in (path.absolute(), *path.absolute().parents) if not folder.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what was written is there to stay
            for folder in made:
                folder.rmdir()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name beside `path`, in a folder that is there and cleared; what has that name, and new empty folders, go."""
    aside = aside_of(path)
    with new_folders(path.parent):
        try:
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                clear_leftovers(path.parent)
                yield aside
        finally:
            with contextlib.suppress(OSError):
                remove(aside)


@contextlib.contextmanager
def new_directory(path: Path | str) -> Iterator[Path]:
    """Yield a directory beside `path` to fill; on success it is synced and renamed to `path`, replacing a former one.

    On any error the half-filled directory is removed and a former `path` stays.

    Raises:
        TrainingError: the disk is full or the place cannot be written.
    """
    path = Path(path)
    former = aside_of(path, FORMER)
    with _beside(path) as aside:
        aside.mkdir()
        yield aside
        mode = aside.stat().st_mode & 0o666  # as the umask has it, which some libraries pass by
        for entry in sorted(aside.rglob("*")):
            if entry.is_file():
                _settle(entry, mode)
        try:
            if os.path.lexists(path):
                os.replace(path, former)
            os.replace(aside, path)
        finally:
            if os.path.lexists(former) and not os.path.lexists(path):
                os.replace(former, path)
        _sync_directory(path.parent)
        remove(former)


@contextlib.contextmanager
def new_file(path: Path | str) -> Iterator[Path]:
    """Yield an empty file beside `path` to write; on success it is synced and renamed to `path`.

    On any error it is removed and a former `path` stays.

    Raises:
        TrainingError: the disk is full or the place cannot be written.
    """
    path = Path(path)
    with _beside(path) as aside:
        aside.touch(exist_ok=False)
        mode = aside.stat().st_mode & 0o777
        yield aside
        _settle(aside, mode)
        os.replace(aside, path)
        _sync_directory(path.parent)


def _settle(path: Path, mode: int) -> None:
    """Have a file's bytes on disk, and whoever may read new files read it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    if path.stat().st_mode & 0o777 != mode:
        path.chmod(mode)


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # what was renamed is in place; and a folder need not be one's to list
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path | str, text: str) -> Path:
    """Write `text` to `path` atomically, making parent directories.

    In UTF-8; half a surrogate pair, which has no place there, as JSON escapes it.

    Raises:
        TrainingError: the disk is full or the directory cannot be written; `path` is left as it was.
    """
    path = Path(path)
    with new_file(path) as aside:
        aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path


def write_json(path: Path | str, value: Any) -> Path:
    """Write `value` as indented JSON, atomically."""
    return write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def check_space(path: Path | str, needed: int, fix: str) -> None:
    """Whether what takes `needed` bytes can be written to `path`.

    Raises:
        TrainingError: its disk has fewer bytes free.
    """
    from .terminal import size

    place = next(parent for parent in Path(path).absolute().parents if parent.exists())
    disk = shutil.disk_usage(place)
    if disk.free < needed and disk.total:  # /proc and its like have no size at all: writing says what they lack
        raise TrainingError(f"no space for {path}: it takes {size(needed)}, {size(disk.free)} are free", fix)
