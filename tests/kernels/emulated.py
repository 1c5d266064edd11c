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

EMULATION = Path(__file__).parent / "emulation"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def on_hopper(monkeypatch, multiprocessors=3):
    """Let kernels think that they are on one with so few multiprocessors."""
    monkeypatch.setattr(device, "_assumed", device.Device("Hopper", "cuda", (9, 0), 232448, 1024, multiprocessors))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def emulate(module, monkeypatch, folder, runner):
    """Let the kernels of `module` run here, on three multiprocessors of a Hopper GPU.

    Args:
        module: of halfbyte.kernels, with a cached `_kernel` that takes `cubin` to `Kernel`.
        folder: to compile in, and to find again what was compiled there before.
        runner: C++ of `run(blocks, threads, bytes, *pointers to the arguments)`, or of `run_NAME` for each kernel.
    """
    from halfbyte.kernels import cuda

    class Emulated:
        def __init__(self, image, name, size):
            source, constants = image
            built = folder / f"{hashlib.sha256(repr(image).encode()).hexdigest()[:16]}.so"
            if not built.exists():
                built.with_suffix(".cpp").write_text(source + runner)
                flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", *(f"-D{k}={v}" for k, v in constants.items())]
                subprocess.run(["g++", *flags, str(built.with_suffix(".cpp")), "-o", str(built)], check=True)
            library = ctypes.CDLL(str(built))
            self.run, self.size = getattr(library, f"run_{name}", None) or library.run, size

        def __call__(self, blocks, threads, arguments):
            self.run(blocks, threads, self.size, *[ctypes.byref(argument) for argument in arguments])

    def source_of(name, capability, constants):
        return cuda.source_of(name, (EMULATION, Path(cuda.__file__).parent)), constants

    monkeypatch.setattr(module, "_kernel", getattr(module._kernel, "__wrapped__", module._kernel))
    monkeypatch.setattr(module, "Kernel", Emulated)
    monkeypatch.setattr(module, "cubin", source_of)
    on_hopper(monkeypatch)
    return module
