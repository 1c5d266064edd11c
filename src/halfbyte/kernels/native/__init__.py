"""Kernels in C for CPUs, compiled once with the machine's C compiler and cached.

Without a compiler, or where compilation fails, the torch references run instead: equal numbers, more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ...dispatch import Unavailable
from ...utils import environment, files
from ...utils.errors import ConfigError, TrainingError

# avoid-fma-max-bits=0: tuned for some CPUs, GCC otherwise splits FMAs in long sums of loops over one row only, and a
# row's sums would depend on the number of rows.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread",
         "--param", "avoid-fma-max-bits=0")  # fmt: skip


def cache_folder() -> Path:
    """`utils.files.cache_folder`, for kernels.

    Raises:
        Unavailable: there is none.
    """
    try:
        return files.cache_folder()
    except ConfigError as error:
        raise Unavailable(f"{error.message}: {error.fix}") from error


def _cpu() -> str:
    """CPU features that `-march=native` depends on: machines of different kinds can share a home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@functools.cache
def _version(compiler: str) -> str:
    """The compiler's version text, or ""."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{compiler} does not run: {error.strerror}") from error
    return done.stdout


def compiler() -> list[str]:
    """The compiler's path and the arguments that the user adds.

    Raises:
        Unavailable: there is none.
    """
    chosen = environment.compiler()
    path = shutil.which(chosen[0])
    if path is None:
        raise Unavailable(f"there is no C compiler ({' '.join(chosen)})")
    return [path, *chosen[1:]]


@functools.cache
def library(name: str, **macros: str | int) -> ctypes.CDLL:
    """Load the shared library of `<name>.c` in this folder, compiling it with these macros if it is not cached.

    Raises:
        Unavailable: with the reason.
    """
    source = Path(__file__).with_name(f"{name}.c")
    command = [*compiler(), *FLAGS, *(f"-D{macro}={value}" for macro, value in macros.items())]
    machine = f"{_version(command[0])}{platform.libc_ver()}{platform.machine()}{_cpu()}"
    read = "".join(file.read_text() for file in (source, *sorted(source.parent.glob("*.h"))))
    key = hashlib.sha256(f"{read}{command}{machine}".encode()).hexdigest()[:16]
    built = cache_folder() / "native" / f"{name}-{key}.so"
    if built.exists():
        with contextlib.suppress(OSError):  # damaged, or of another machine with the same key: compile again
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
                messages = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
                reason = messages[0].strip() if messages else f"exit code {done.returncode}, without a word"
                raise Unavailable(f"{command[0]} failed: {reason}")
    except TrainingError as error:
        raise Unavailable(error.message) from error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="halfbyte")


def parallel(function: Callable[[int, int], None], count: int, grain: int) -> None:
    """Call `function(first, last)` over [0, count) in parts of at least `grain`, on torch's number of threads."""
    threads = min(torch.get_num_threads(), max(count // grain, 1))
    if threads == 1:
        function(0, count)
        return
    step = -(-count // threads)
    # ctypes releases the GIL, so Python threads run concurrently.
    list(_pool(threads).map(lambda start: function(start, min(start + step, count)), range(0, count, step)))
