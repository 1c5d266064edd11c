"""Faster starts: a bytecode cache for read-only installations, and imports of torch without garbage collection.

Python compiles a module's source at each import unless compiled bytecode is next to it. An installation that belongs to
another user or to an image may have no bytecode and not be writable. Then every command would compile the 3,800 modules
of torch, transformers and others again (docs/design/configuration-and-startup.md).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import __version__
from ..utils.console import Console
from ..utils.errors import ConfigError
from ..utils.files import cache_folder
from ..utils.processes import is_rank
from ..utils.text import one_line
from ..utils.waiting import showing_waits, waiting

LARGEST = "torch"  # the library whose installation is checked
UNUSED = ("bitsandbytes", "sklearn")  # packages that transformers or PEFT import if they are installed
COMPILER = "torch._dynamo"
OPTIONS = f"{COMPILER}.config"  # read on fake tensors
MASKS = f"{COMPILER}._trace_wrapped_higher_order_op"  # the module that transformers' masks import
DECORATORS = ("allow_in_graph", "assume_constant_result", "mark_static_address")  # they change how code is compiled


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
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or found.cached is None:
        return None
    source, compiled = Path(found.origin), Path(found.cached)
    place = compiled.parent if compiled.parent.is_dir() else source.parent
    return None if compiled.is_file() or os.access(place, os.W_OK) else source


def _installation_hash(site: Path) -> str:
    """Hash of the installed packages and their versions.

    Python compares a source only by time and size with its bytecode, and some images give all files the same time.
    """
    installed = sorted(each for each in os.listdir(site) if each.endswith(".dist-info"))
    return hashlib.sha256("\n".join([str(site), *installed]).encode()).hexdigest()[:16]


@contextlib.contextmanager
def started(*subjects: object, console: Console | None = None) -> Iterator[None]:
    """Print the first line of a command, before it imports more, and within the context what it waits for.

    Args:
        subjects: the names that the command was given.
        console: default: stderr, for commands whose output on stdout is data.
    """
    console = console or Console(stderr=True)
    line = " · ".join([f"halfbyte {__version__}", *map(str, subjects)])
    console.print(one_line(line), soft_wrap=True)
    with showing_waits(console):
        yield


def import_models() -> None:
    """Import everything that loads a saved model and generates with it, inside `quick_imports`."""
    with quick_imports():
        from ..generation import run  # noqa: F401
        from ..loading import load  # noqa: F401
        from ..modeling import adapters  # noqa: F401


@contextlib.contextmanager
def quick_imports(libraries: str = "torch, transformers and PEFT") -> Iterator[None]:
    """Reduce the time of imports within the context to half.

    Garbage collection is off, since it would traverse a million objects that stay alive; later collections skip these
    objects. `UNUSED` packages are hidden, since transformers and PEFT import those that they see; models here have no
    layers of bitsandbytes. After the context they can be imported. In a process that is no rank, torch's compiler and
    `torch.distributed.tensor` are not imported either (`_without_compiler`).
    """
    hidden, collects = [name for name in UNUSED if name not in sys.modules], gc.isenabled()
    gc.disable()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        with waiting(f"importing {libraries}"), contextlib.nullcontext() if is_rank() else _without_compiler():
            yield
        if "bitsandbytes" in hidden and "peft" in sys.modules:
            sys.modules["peft"].import_utils.is_bnb_available()  # caches the answer
    finally:
        for name in hidden:
            del sys.modules[name]
        if collects:
            gc.freeze()
            gc.enable()


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Within the context, importing transformers and PEFT does not import torch._dynamo and torch.distributed.tensor.

    These are 900 modules that a single process without torch.compile does not run. transformers imports the second
    where torch has collectives, which is answered with no. It imports the first for decorators of functions that are
    compiled, and for a class that its masks rarely use. If a version lacks a replaced name, its imports take longer.
    """
    import torch
    from transformers import utils

    def no_collectives() -> bool:
        return False

    for module in (utils, utils.import_utils) if "transformers.distributed" not in sys.modules else ():
        if hasattr(module, "is_torch_distributed_available"):
            module.is_torch_distributed_available = no_collectives
    if COMPILER not in sys.modules:
        compiler = sys.modules[COMPILER] = _LateCompiler(COMPILER)
        compiler.__path__ = [str(Path(torch.__path__[0]) / "_dynamo")]
        importlib.import_module(OPTIONS)
        del compiler.__path__  # the next import of a part of the compiler imports all of it
    elif not isinstance(sys.modules[COMPILER], _LateCompiler):
        yield
        return
    masks = sys.modules[MASKS] = ModuleType(MASKS)
    masks.TransformGetItemToIndex = lambda: importlib.import_module(MASKS).TransformGetItemToIndex()  # type: ignore
    try:
        yield
    finally:
        if sys.modules.get(MASKS) is masks:
            del sys.modules[MASKS]


class _LateCompiler(ModuleType):
    """Stand-in for torch._dynamo that imports it when anything but a decorator is used.

    torch itself calls `disable` in optimizers and on the meta device. Without the compiler a decorator has no effect,
    so decorated functions run as they are. The compiler traces the few that were decorated before it was imported like
    any other function.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(COMPILER) is self:
            if name in DECORATORS:
                return lambda function: function
            if name == "disable":
                return _disabled_later
            for part in (COMPILER, OPTIONS, MASKS):
                sys.modules.pop(part, None)
        return getattr(importlib.import_module(COMPILER), name)


def _disabled_later(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
    """torch._dynamo.disable for a time at which the compiler is not imported; once it is, it sees the function."""
    if function is None:
        return lambda function: _disabled_later(function, recursive, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        compiler = sys.modules[COMPILER]
        disabled = function if isinstance(compiler, _LateCompiler) else compiler.disable(function, recursive)
        return disabled(*arguments, **named)

    return call
