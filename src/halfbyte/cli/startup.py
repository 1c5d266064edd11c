"""Faster starts: a bytecode cache for read-only installations, and imports of torch without garbage collection.

Python compiles a module's source at each import unless compiled bytecode is next to it. An installation that belongs to
another user or to an image may have no bytecode and not be writable. Then every command would compile the 3,800 modules
of torch, transformers and others again (docs/design/configuration-and-startup.md).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..utils.errors import ConfigError
from ..utils.files import cache_folder
from ..utils.text import one_line
from ..utils.waiting import showing_waits, waiting

LARGEST = "torch"  # the library whose installation is checked
UNUSED = ("bitsandbytes", "sklearn")  # packages that transformers or PEFT import if they are installed


def keep_bytecode() -> None:
    """Have Python store bytecode in halfbyte's cache folder if it cannot store it next to the libraries.

    Changes nothing if torch has bytecode or its folder is writable, or if the user has chosen a place
    (`PYTHONPYCACHEPREFIX`) or disabled bytecode (`PYTHONDONTWRITEBYTECODE`, `python -B`).
    """
    if sys.pycache_prefix is not None or sys.dont_write_bytecode or LARGEST in sys.modules:
        return
    source = _source_without_bytecode(LARGEST)
    if source is None:
        return
    with contextlib.suppress(ConfigError, OSError):  # without a writable folder, every start compiles
        folder = cache_folder().absolute() / "bytecode" / _installation_hash(source.parent.parent)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():  # Python executes the bytecode there
            sys.pycache_prefix = str(folder)


def _source_without_bytecode(package: str) -> Path | None:
    """Return the source of a package that has no bytecode and cannot get any."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None:
        return None
    source, compiled = Path(spec.origin), Path(spec.cached)
    folder = compiled.parent if compiled.parent.is_dir() else source.parent
    return None if compiled.is_file() or os.access(folder, os.W_OK) else source


def _installation_hash(site: Path) -> str:
    """Hash of the installed packages and their versions.

    Python compares a source only by time and size with its bytecode, and some images give all files the same time.
    """
    installed = sorted(name for name in os.listdir(site) if name.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(site), *installed]).encode()).hexdigest()[:16]


@contextlib.contextmanager
def started(*subjects: object, stderr: bool = True) -> Iterator[None]:
    """Print the first line of a command, before it imports more, and within the context what it waits for.

    Args:
        subjects: the names that the command was given.
        stderr: print there, for commands whose output on stdout is data.
    """
    from ..utils.console import Console

    console = Console(stderr=stderr)
    line = " · ".join([f"halfbyte {__version__}", *map(str, subjects)])
    console.print(one_line(line), soft_wrap=True)
    with showing_waits(console):
        yield


def import_models() -> None:
    """Import everything that loads a saved model and generates with it, inside `quick_imports`."""
    with quick_imports():
        from ..adapters import lora as adapters  # noqa: F401
        from ..generation import run  # noqa: F401
        from ..loading import load  # noqa: F401


@contextlib.contextmanager
def quick_imports(libraries: str = "torch, transformers and PEFT") -> Iterator[None]:
    """Reduce the time of imports within the context to two thirds.

    Garbage collection is off, since it would traverse a million objects that stay alive; later collections skip these
    objects. `UNUSED` packages are hidden, since transformers and PEFT import those that they see; models here have no
    layers of bitsandbytes. After the context they can be imported.
    """
    hidden, collects = [name for name in UNUSED if name not in sys.modules], gc.isenabled()
    gc.disable()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        with waiting(f"importing {libraries}"):
            yield
        if "bitsandbytes" in hidden and "peft" in sys.modules:
            sys.modules["peft"].import_utils.is_bnb_available()  # caches the answer
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.freeze()
            gc.enable()
