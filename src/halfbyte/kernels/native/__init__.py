"""Kernels in C for CPUs, built with the machine's own compiler, once, into a cache.

Without a compiler (or where the build fails) the torch references run instead: the same numbers, more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...dispatch import Unavailable
from ...utils import files
from ...utils.errors import ConfigError, TrainingError

# The last: tuned for some CPUs, GCC leaves FMAs out of long sums, in loops over one row only, and a row's sums would be
# others alone than beside others. 0: it leaves none out.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread",
         "--param", "avoid-fma-max-bits=0")  # fmt: skip


def cache_folder() -> Path:
    """As `utils.files.cache_folder`.

    Raises:
        Unavailable: there is none.
    """
    try:
        return files.cache_folder()
    except ConfigError as error:
        raise Unavailable(f"{error.message}: {error.fix}") from error


def _cpu() -> str:
    """What `-march=native` depends on: a home folder can be shared by machines of different kinds."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@functools.cache
def _version(compiler: str) -> str:
    """What the compiler says of itself; "" if nothing."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{compiler} does not run: {error.strerror}") from error
    return done.stdout


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The shared library built from `<name>.c` in this folder.

    Raises:
        Unavailable: with the reason.
    """
    source = Path(__file__).with_name(f"{name}.c")
    chosen = shlex.split(os.environ.get("CC") or "cc")
    compiler = shutil.which(chosen[0]) if chosen else None
    if compiler is None:
        raise Unavailable(f"there is no C compiler ({' '.join(chosen) or 'cc'})")
    command = [compiler, *chosen[1:], *FLAGS]
    machine = f"{_version(compiler)}{platform.libc_ver()}{platform.machine()}{_cpu()}"
    read = "".join(each.read_text() for each in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256(f"{read}{command}{machine}".encode()).hexdigest()[:16]
    built = cache_folder() / "native" / f"{name}-{key}.so"
    if built.exists():
        with contextlib.suppress(OSError):  # damaged, or of a machine that the key does not tell apart: built again
            return ctypes.CDLL(str(built))
    _build(command, source, built)
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise Unavailable(f"{built} does not load: {error}") from error


def _build(command: list[str], source: Path, built: Path) -> None:
    try:
        with files.new_file(built) as aside:
            done = subprocess.run(
                [*command, str(source), "-o", str(aside), "-lm"], capture_output=True, text=True, check=False
            )
            if done.returncode or not aside.exists() or not aside.stat().st_size:
                said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
                reason = said[0].strip() if said else f"exit code {done.returncode}, without a word"
                raise Unavailable(f"{command[0]} failed: {reason}")
    except TrainingError as error:
        raise Unavailable(error.message) from error


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
