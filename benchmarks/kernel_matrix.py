"""Which kernel compiles for which GPU, without one: `python -m benchmarks.kernel_matrix` writes docs/kernels.md.

What dispatch would launch on a device is asked of the twins themselves: they are called on tensors without data while a
device is assumed (`kernels.device.assumed`), and what they would have launched is written down. Each launch is compiled
for that device, by Triton or NVRTC, and what it takes of shared memory and registers is held against what there is.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from halfbyte import kernels
from halfbyte.kernels import cuda
from halfbyte.kernels.device import Device, assumed
from halfbyte.kernels.launch import Launcher

KIB = 1024
REGISTERS = 255  # of a thread on NVIDIA's GPUs
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Target:
    """A device that kernels are compiled for, and what Triton calls it."""

    device: Device
    triton: GPUTarget

    @property
    def name(self) -> str:
        return self.triton.arch if isinstance(self.triton.arch, str) else f"sm_{self.triton.arch}"


def _nvidia(arch: int, cards: str, shared_kib: int, multiprocessors: int) -> Target:
    capability = divmod(arch, 10)
    device = Device(cards, "cuda", capability, shared_kib * KIB, KIB, multiprocessors)
    return Target(device, GPUTarget("cuda", arch, 32))


def _amd(arch: str, cards: str, multiprocessors: int) -> Target:
    return Target(Device(cards, "hip", (0, 0), 64 * KIB, None, multiprocessors), GPUTarget("hip", arch, 64))


TARGETS = [
    _nvidia(75, "T4, RTX 20", 64, 40),
    _nvidia(80, "A100", 163, 108),
    _nvidia(86, "RTX 30, A10, A6000", 99, 84),
    _nvidia(89, "RTX 40, L4, L40S", 99, 142),
    _nvidia(90, "H100, H200", 227, 132),
    _nvidia(100, "B200", 227, 148),
    _nvidia(120, "RTX 50, RTX PRO 6000", 99, 188),
    _amd("gfx90a", "MI200", 110),
    _amd("gfx942", "MI300", 304),
]


@dataclass
class Launch:
    """What a launcher would have launched."""

    launcher: Launcher
    tensors: tuple
    numbers: tuple
    constants: tuple
    warps: int

    @property
    def name(self) -> str:
        return kernel_name(self.launcher)

    @property
    def key(self) -> tuple:
        """All that the compiled kernel follows from."""
        numbers = tuple((type(n), n == 1, isinstance(n, int) and n % 16 == 0) for n in self.numbers)
        return self.name, tuple(t.dtype for t in self.tensors), numbers, self.constants, self.warps


@dataclass
class CudaLaunch:
    """What was compiled by NVRTC, and how it would have been launched."""

    name: str
    image: bytes
    shared_bytes: int
    threads: set[int] = field(default_factory=set)


def kernel_name(launcher: Launcher) -> str:
    module = launcher.function.__module__.removeprefix("halfbyte.kernels.")
    return f"{module}.{launcher.function.__name__.lstrip('_')}"


def modules() -> list[Any]:
    """The modules of halfbyte.kernels that are not for CPUs."""
    names = [each.name for each in pkgutil.iter_modules(kernels.__path__) if not each.ispkg]
    return [importlib.import_module(f"halfbyte.kernels.{name}") for name in names if not name.endswith("_cpu")]


def triton_kernels() -> set[str]:
    """Every kernel that a launcher has, and every function that reads like one."""
    values = [(module, value) for module in modules() for value in vars(module).values()]
    launched = {kernel_name(value) for _, value in values if isinstance(value, Launcher)}
    jitted = {
        f"{module.__name__.removeprefix('halfbyte.kernels.')}.{value.__name__.lstrip('_')}"
        for module, value in values
        if isinstance(value, JITFunction) and value.__module__ == module.__name__ and _is_kernel(value)
    }
    return launched | jitted


def _is_kernel(function: JITFunction) -> bool:
    """Whether it is launched, not called by others: a kernel asks for its place among programs, and returns nothing."""
    source = inspect.getsource(function.fn)
    return "tl.program_id(0)" in source and not re.search(r"^    return", source, re.MULTILINE)


def cuda_kernels() -> set[str]:
    folder = Path(cuda.__file__).parent
    text = "".join(path.read_text() for path in sorted(folder.glob("*.cu*")))
    found = re.findall(r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*(\w+)\(', text)
    return set(found)


class _Driver:
    """Tells Triton that a target is there."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # what Triton keeps compiled kernels under

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def recorded(target: Target) -> Iterator[tuple[list[Launch], list[CudaLaunch]]]:
    """Write down what is launched, and launch nothing, on a target that is assumed."""
    launches: list[Launch] = []
    compiled: list[CudaLaunch] = []

    def record(self, device, programs, tensors, numbers, constants, warps):
        launches.append(Launch(self, tensors, numbers, constants, warps))

    class Recorded:
        def __init__(self, image: bytes, name: str, shared_bytes: int):
            if shared_bytes > target.device.shared_bytes:
                raise cuda.BuildError(f"{name} needs {shared_bytes} bytes of shared memory")
            self.launch = CudaLaunch(name, image, shared_bytes)
            compiled.append(self.launch)

        def __call__(self, blocks, threads, arguments, together=False):
            self.launch.threads.add(threads)

        def check_together(self, blocks, threads):
            self.launch.threads.add(threads)

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(assumed(target.device))
        enter(mock.patch.object(Launcher, "_launch", record))
        for module in modules():
            if hasattr(module, "_kernel"):
                module._kernel.cache_clear()
                stack.callback(module._kernel.cache_clear)
            if hasattr(module, "Kernel"):
                enter(mock.patch.object(module, "Kernel", Recorded))
        yield launches, compiled


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes of a device, or why it does not compile."""

    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    reason: str = ""

    def obstacle(self, device: Device) -> str:
        """Why the device does not run it; "" where it does."""
        if self.reason:
            return self.reason
        if self.shared_bytes > device.shared_bytes:
            return f"{self.shared_bytes} bytes of shared memory"
        if self.registers > REGISTERS and device.kind == "cuda":
            return f"{self.registers} registers"
        return ""


def compile_triton(launch: Launch, target: Target) -> Taken:
    """As the launcher would compile it there."""
    driver.set_active(_Driver(target.triton))
    try:
        compiled = launch.launcher.function.warmup(
            *launch.tensors, *launch.numbers, *launch.constants, grid=(1, 1, 1), num_warps=launch.warps,
            **launch.launcher.options,
        )  # fmt: skip
    except Exception as error:
        if not isinstance(error, triton.errors.TritonError | RuntimeError):  # what a launcher would not catch
            raise
        told = getattr(error, "error_message", None) or str(error.__cause__ or error)
        return Taken(reason=next((line.strip() for line in told.splitlines() if line.strip()), type(error).__name__))
    if target.device.kind == "hip":
        return Taken(compiled.metadata.shared, *_amd_registers(compiled.asm["amdgcn"]))
    registers, spilled, _ = resources(compiled.asm["cubin"])[compiled.name]
    return Taken(compiled.metadata.shared, registers, spilled)


def _amd_registers(assembly: str) -> tuple[int, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    return number("vgpr_count"), 4 * number("vgpr_spill_count")


def resources(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """For each kernel: registers of a thread, bytes of its stack, where spilled ones go, and static shared bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)"
    found = re.findall(pattern, done.stdout)
    return {name: (int(reg), int(stack) + int(local), int(shared)) for name, reg, stack, shared, local in found}


def compile_cuda(launch: CudaLaunch) -> Taken:
    """What NVRTC's image takes: its own shared memory and what its launcher asks for beside that."""
    registers, spilled, static = resources(launch.image)[launch.name]
    return Taken(static + launch.shared_bytes, registers, spilled)
