"""The CUDA kernels' own code, compiled for a CPU against emulated warps (`emulation/warp.cuh`)."""

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from halfbyte.kernels import device
from halfbyte.kernels.cuda import nvrtc

EMULATION = Path(__file__).parent / "emulation"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def on_hopper(monkeypatch, multiprocessors=3):
    """Let kernels think that they are on one with so few multiprocessors."""
    monkeypatch.setattr(device, "_assumed", device.Device("Hopper", "cuda", (9, 0), 232448, 1024, multiprocessors))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def built(name, constants, folder, runner=""):
    """`<name>.cu` and C++ that runs it, compiled for a CPU: the folder's headers, but for those that emulation has."""
    sources = folder / "sources"
    sources.mkdir(exist_ok=True)
    for source in (*nvrtc.FOLDER.glob("*.cu*"), *EMULATION.iterdir()):
        link = sources / source.name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    key = hashlib.sha256(repr((name, constants, runner)).encode()).hexdigest()[:16]
    library = folder / f"{key}.so"
    if not library.exists():
        (sources / f"{key}.cpp").write_text(f'#include "{name}.cu"\n{runner}')
        flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *(f"-D{k}={v}" for k, v in constants.items())]
        subprocess.run(["g++", *flags, str(sources / f"{key}.cpp"), "-o", str(library)], check=True)
    return library


def image_of(folder, runner=""):
    """What stands in for `nvrtc.cubin`: the code is a library's path."""

    def cubin(name, capability, constants, structs=()):
        library = built(name, constants, folder, runner)
        return nvrtc.Image(library, *nvrtc.checked(nvrtc.exported(library.read_bytes()), name, structs))

    return cubin


class Emulated:
    """A `Kernel` that runs on a CPU."""

    def __init__(self, image, name, size=None):
        library, self.size = ctypes.CDLL(str(image.code)), image.shared if size is None else size
        self.run = getattr(library, f"run_{name}", None) or library.run

    def __call__(self, blocks, threads, arguments, together=False):
        self.run(blocks, threads, self.size, *[ctypes.byref(argument) for argument in arguments])


def emulate(module, monkeypatch, folder, runner):
    """Let the kernels of `module` run here, on three multiprocessors of a Hopper GPU.

    Args:
        module: of halfbyte.kernels.cuda, with a cached `_kernel` that takes `cubin` to `Kernel`.
        folder: to compile in, and to find again what was compiled there before.
        runner: C++ of `run(blocks, threads, bytes, *pointers to the arguments)`, or of `run_NAME` for each kernel.
    """
    for name in ("_kernel", "_image"):
        if cached := getattr(module, name, None):
            monkeypatch.setattr(module, name, getattr(cached, "__wrapped__", cached))
    monkeypatch.setattr(module, "Kernel", Emulated)
    monkeypatch.setattr(module, "cubin", image_of(folder, runner))
    on_hopper(monkeypatch)
    return module
