"""install(), override() and uninstall(): stand in for the real bitsandbytes, or replace its kernels."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

from ..utils.errors import ModelError
from . import _ops, overriding

NAME = "bitsandbytes"
OWN = __package__
_ASKED_BEFORE = ("transformers.utils.import_utils", "accelerate.utils.imports", "peft.import_utils")


class _Distribution(importlib.metadata.Distribution):
    """Metadata of the distribution "bitsandbytes" while this package is installed in its place."""

    def read_text(self, filename: str) -> str | None:
        version = sys.modules[OWN].__version__
        summary = "halfbyte's implementation of the interface of bitsandbytes"
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: {summary}\n",
            "top_level.txt": f"{NAME}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return os.path.join(os.path.dirname(__file__), path)


class _Loader(importlib.abc.Loader):
    """Loads a module of this package under its name below `bitsandbytes`: both names are one module object."""

    def __init__(self, module_name: str):
        self._own = module_name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has replaced it

    def get_code(self, fullname: str) -> Any:  # for `python -m bitsandbytes`
        spec = importlib.util.find_spec(self._own)
        return spec.loader.get_code(self._own) if spec and spec.loader else None  # type: ignore[attr-defined]


class _Finder(importlib.metadata.DistributionFinder):
    """Meta-path finder of `bitsandbytes`, its submodules and its metadata."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != NAME and not fullname.startswith(f"{NAME}."):
            return None
        module_name = OWN + fullname.removeprefix(NAME)
        try:
            module = sys.modules.get(module_name) or importlib.util.find_spec(module_name)
        except ModuleNotFoundError:
            module = None
        if module is None:
            return None
        package = hasattr(module, "__path__") or bool(getattr(module, "submodule_search_locations", None))
        return importlib.machinery.ModuleSpec(fullname, _Loader(module_name), origin=module_name, is_package=package)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context is None or context.name in (None, NAME) else []


_finder = _Finder()


def is_installed() -> bool:
    """Return whether `import bitsandbytes` finds this package."""
    return _finder in sys.meta_path


def real_package_is_present() -> bool:
    """Return whether the real package is loaded or could be imported."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return loaded is not sys.modules[OWN]
    finders = [finder for finder in sys.meta_path if finder is not _finder]
    return any(finder.find_spec(NAME, None) for finder in finders if hasattr(finder, "find_spec"))


def install() -> None:
    """Answer `import bitsandbytes` and its distribution metadata with this package, in this process.

    A second call has no effect.

    Raises:
        ModelError: the real package is loaded already, or this is not the main thread.
    """
    if is_installed():
        return
    if threading.current_thread() is not threading.main_thread():
        raise ModelError(
            "install() changes the imports of the entire process and was called in a thread",
            "call install() in the main thread, before other threads import bitsandbytes",
        )
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        raise ModelError(
            f"the real bitsandbytes is loaded already, by {_importer(loaded)}",
            "call halfbyte.bitsandbytes.install() before that import, or run the script with "
            "python -m halfbyte.bitsandbytes",
        )
    _ops.register()
    sys.meta_path.insert(0, _finder)
    _forget_answers()


def override() -> None:
    """Replace the kernels of the real package's operators, and make its optimizers step all parameters at once.

    Call it before learning-rate schedulers are made: these hold the step of their optimizer. Operators on other devices
    than CPU, CUDA and XPU, and `gemv_4bit` on a CPU, keep their kernels. A second call has no effect.

    Raises:
        ModelError: `install` is on, or the real package cannot be imported.
    """
    if overriding.is_active():
        return
    if is_installed():
        raise ModelError(
            "override() changes the real bitsandbytes, and install() answers its import with halfbyte",
            "call halfbyte.bitsandbytes.uninstall() first",
        )
    try:
        real = importlib.import_module(NAME)
    except ImportError as error:
        raise ModelError(
            f"override() changes the real bitsandbytes, which cannot be imported: {error}",
            "install bitsandbytes, or call halfbyte.bitsandbytes.install()",
        ) from error
    overriding.start(real)


def mode() -> str:
    """Return which of "install" and "override" is on, or "none"."""
    return "install" if is_installed() else "override" if overriding.is_active() else "none"


def uninstall() -> None:
    """Undo `install`, so that the next `import bitsandbytes` finds the real package if there is one, and `override`."""
    overriding.stop()
    if not is_installed():
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
        del sys.modules[name]
    if real_package_is_present():
        _ops.unregister()
    _forget_answers()


def _importer(real: types.ModuleType) -> str:
    """Return the names of up to three modules that refer to the real package."""
    names = [
        name
        for name, module in list(sys.modules.items())
        if not name.startswith(NAME) and any(value is real for value in list(getattr(module, "__dict__", {}).values()))
    ]
    return ", ".join(names[:3]) or "a module that kept no reference to it"


def _forget_answers() -> None:
    """Clear the cached answers of transformers, accelerate and PEFT to whether bitsandbytes is available."""
    importlib.invalidate_caches()
    for name in _ASKED_BEFORE:
        for key, function in list(vars(sys.modules[name]).items()) if name in sys.modules else []:
            if any(word in key for word in ("bitsandbytes", "bnb", "_is_package_available")):
                getattr(function, "cache_clear", lambda: None)()
