"""Compile the CUDA sources for a CPU with emulated warps (`emulation/warp.cuh`)."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from halfbyte.kernels import device
from halfbyte.kernels.cuda import nvrtc

SOURCES, EMULATION = nvrtc.FOLDER, Path(__file__).parent / "emulation"
ROOT = Path()  # the folder of all processes of a test run: see `conftest`
FLAGS = ["-std=c++17", "-O1", "-w", "-fPIC"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def on_hopper(monkeypatch, multiprocessors=3):
    """Assume a Hopper GPU with `multiprocessors` multiprocessors."""
    monkeypatch.setattr(device, "_assumed", device.Device("Hopper", "cuda", (9, 0), 232448, 1024, multiprocessors))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@functools.cache
def workshop():
    """Folder of sources and built libraries, with precompiled standard headers."""
    folder = ROOT / "emulated"
    folder.mkdir(exist_ok=True)
    with _alone(folder / "sources"):
        if not (standard := folder / "standard.h").exists():
            for name, source in {path.name: path for path in (*SOURCES.glob("*.cu*"), *EMULATION.iterdir())}.items():
                (folder / name).symlink_to(source)
            headers = re.findall(r"^#include <.*", (EMULATION / "warp.cuh").read_text(), re.MULTILINE)
            standard.write_text("\n".join(headers))
            subprocess.run(["g++", *FLAGS, "-x", "c++-header", str(standard), "-o", f"{standard}.gch"], check=True)
    return folder


@contextlib.contextmanager
def _alone(path):
    """Lock `path` against other processes."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def built(name, constants, runner=""):
    """Compile `<name>.cu` and the C++ `runner` for a CPU, with emulated headers where they exist."""
    folder = workshop()
    key = hashlib.sha256(repr((name, constants, runner)).encode()).hexdigest()[:16]
    library = folder / f"{key}.so"
    with _alone(library):
        if not library.exists():
            (folder / f"{key}.cpp").write_text(f'#include "{name}.cu"\n{runner}')
            flags = [*FLAGS, "-include", str(folder / "standard.h"), *(f"-D{k}={v}" for k, v in constants.items())]
            subprocess.run(["g++", *flags, "-shared", str(folder / f"{key}.cpp"), "-o", str(library)], check=True)
    return library


def image_of(runner=""):
    """Return a replacement of `nvrtc.cubin` that returns a library's path. `runner`: C++, or by source {name: C++}."""

    def cubin(name, capability, constants, structs=()):
        library = built(name, constants, runner if isinstance(runner, str) else runner[name])
        return nvrtc.Image(library, *nvrtc.checked(nvrtc.exported(library.read_bytes()), name, structs))

    return cubin


class Emulated:
    """A `Kernel` that runs on a CPU."""

    def __init__(self, image, name, size=None):
        library, self.size = ctypes.CDLL(str(image.code)), image.shared if size is None else size
        self.run = getattr(library, f"run_{name}", None) or library.run

    def __call__(self, blocks, threads, arguments, together=False):
        self.run(blocks, threads, self.size, *[ctypes.byref(argument) for argument in arguments])


def emulate(module, monkeypatch, runner):
    """Run the kernels of `module` on a CPU, as if on three multiprocessors of a Hopper GPU.

    Args:
        module: of halfbyte.kernels.cuda; its `remembered` functions pass `cubin` to `Kernel`.
        runner: C++ of `run(blocks, threads, bytes, *pointers to the arguments)`, or of `run_NAME` for each kernel;
            or {source: C++}.
    """
    for name, function in list(vars(module).items()):
        if hasattr(function, "cache_clear") and getattr(function, "__module__", "") == module.__name__:
            monkeypatch.setattr(module, name, function.__wrapped__)
    monkeypatch.setattr(module, "Kernel", Emulated)
    monkeypatch.setattr(module, "cubin", image_of(runner))
    on_hopper(monkeypatch)
    return module
