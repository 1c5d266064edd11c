"""Compiled Python for an installation that has none and cannot be written to.

Python compiles a module's source at each import unless it finds the result beside it. In an installation that belongs
to another user or to an image there may be none, and Python cannot leave one: every command compiles the 3,800 modules
of torch, transformers and the others anew (docs/design.md, "The first seconds").
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
from pathlib import Path

from ..utils.errors import ConfigError
from ..utils.files import cache_folder

LARGEST = "torch"  # the library whose installation is looked at


def keep_bytecode() -> None:
    """Have Python keep what it compiles in halfbyte's cache folder, where it cannot beside the libraries.

    Nothing changes where there are compiled modules or may be, and where the user has said where they go
    (`PYTHONPYCACHEPREFIX`) or that none are written (`PYTHONDONTWRITEBYTECODE`, `python -B`).
    """
    if sys.pycache_prefix is not None or sys.dont_write_bytecode or LARGEST in sys.modules:
        return
    source = _never_compiled(LARGEST)
    if source is None:
        return
    with contextlib.suppress(ConfigError, OSError):  # nowhere to keep anything: compiled anew, as before
        folder = cache_folder().absolute() / "bytecode" / _key(source.parent.parent)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():  # what is loaded from there is run
            sys.pycache_prefix = str(folder)


def _never_compiled(package: str) -> Path | None:
    """The source of a package whose compiled form is not beside it, and cannot be."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or found.cached is None:
        return None
    source, compiled = Path(found.origin), Path(found.cached)
    place = compiled.parent if compiled.parent.is_dir() else source.parent
    return None if compiled.is_file() or os.access(place, os.W_OK) else source


def _key(site: Path) -> str:
    """Of what is installed, by names and versions: Python takes a file for the same source by its time and size alone,
    and some images give every file one time."""
    installed = sorted(each for each in os.listdir(site) if each.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(site), *installed]).encode()).hexdigest()[:16]
