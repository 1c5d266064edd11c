"""Builds and loads the C twins of the CPU ops with the machine's own compiler, once, into a cache.

Without a compiler (or where the build fails) the torch references run instead: the same numbers, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")


class BuildError(ImportError):
    """No compiler, or it refused the source."""


def cache_folder() -> Path:
    """Where built libraries are kept: $HALFBYTE_CACHE, else the user's cache folder."""
    chosen = os.environ.get("HALFBYTE_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "halfbyte"


def _cpu() -> str:
    """What `-march=native` depends on: a home folder can be shared by machines of different kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The shared library built from `<name>.c` in this folder.

    Raises:
        BuildError: with the reason.
    """
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise BuildError("there is no C compiler (cc)")
    key = hashlib.sha256(f"{source.read_text()}{compiler}{FLAGS}{platform.machine()}{_cpu()}".encode()).hexdigest()[:16]
    built = cache_folder() / "native" / f"{name}-{key}.so"
    if not built.exists():
        _build(compiler, source, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise BuildError(f"{built} does not load: {error}") from error


def _build(compiler: str, source: Path, built: Path) -> None:
    try:
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            aside = Path(folder) / built.name
            done = subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(aside), "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise BuildError(f"{compiler} failed: {done.stderr.strip().splitlines()[0]}")
            os.replace(aside, built)
    except OSError as error:
        raise BuildError(f"cannot write to {built.parent}: {error.strerror}") from error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="halfbyte")


def parallel(function: Callable[[int, int], None], count: int, grain: int) -> None:
    """Call `function(first, last)` over [0, count) on torch's number of threads; pieces of at least `grain`."""
    threads = min(torch.get_num_threads(), max(count // grain, 1))
    if threads == 1:
        function(0, count)
        return
    step = -(-count // threads)
    # ctypes releases the interpreter's lock, so plain threads run side by side.
    list(_pool(threads).map(lambda start: function(start, min(start + step, count)), range(0, count, step)))
