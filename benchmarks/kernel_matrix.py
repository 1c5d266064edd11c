"""Which kernel compiles for which GPU, without one: `python -m benchmarks.kernel_matrix` writes docs/kernels.md.

What dispatch would launch on a device is asked of dispatch itself: ops are called on tensors without data while a
device is assumed (`kernels.device.assumed`), and what they would have launched is written down. Each launch is compiled
for that device, by Triton or NVRTC, and what it takes of shared memory and registers is held against what there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from halfbyte.dispatch import Unavailable
from halfbyte.kernels import cuda
from halfbyte.kernels import triton as triton_folder
from halfbyte.kernels.cuda import nvrtc
from halfbyte.kernels.device import KNOWN, Device, assumed
from halfbyte.kernels.triton import lora_glu
from halfbyte.kernels.triton.launch import Launcher
from halfbyte.utils import files

from .kernel_cases import BF16, CASES, FP32, Case, attend_call, empty

KIB = 1024
ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "kernel_matrix.json", ROOT / "docs" / "kernels.md"
REGISTERS = 255  # of a thread on NVIDIA's GPUs
SPILLED = 256  # bytes of a thread from which the page says so: slower, and right
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Target:
    """A device that kernels are compiled for, and what Triton calls it."""

    device: Device
    triton: GPUTarget

    @property
    def name(self) -> str:
        return self.triton.arch if isinstance(self.triton.arch, str) else f"sm_{self.triton.arch}"


TARGETS = [
    *(Target(KNOWN[name], GPUTarget("cuda", arch, 32))
      for name, arch in (("t4", 75), ("a100", 80), ("rtx3090", 86), ("rtx4090", 89), ("h100", 90), ("b200", 100),
                         ("rtx5090", 120))),
    *(Target(KNOWN[name], GPUTarget("hip", arch, 64)) for name, arch in (("mi200", "gfx90a"), ("mi300", "gfx942"))),
]  # fmt: skip


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
    module = launcher.function.__module__.removeprefix("halfbyte.kernels.triton.")
    return f"{module}.{launcher.function.__name__.lstrip('_')}"


@functools.cache
def modules() -> list[Any]:
    """The modules of halfbyte.kernels.triton and halfbyte.kernels.cuda."""
    found = [pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.") for folder in (triton_folder, cuda)]
    return [importlib.import_module(each.name) for each in itertools.chain(*found)]


def triton_kernels() -> set[str]:
    """Every kernel that a launcher has, and every function that reads like one."""
    values = [(module, value) for module in modules() for value in vars(module).values()]
    launched = {kernel_name(value) for _, value in values if isinstance(value, Launcher)}
    jitted = {
        f"{module.__name__.removeprefix('halfbyte.kernels.triton.')}.{value.__name__.lstrip('_')}"
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
    defined = re.findall(r'extern "C" __global__ void\s+(?:__\w+__\([^)]*\)\s*)*([a-z]\w*)\(', text)
    return {*defined, *re.findall(r"^PRODUCT\((\w+), \w+\)", text, re.MULTILINE)}


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


@dataclass
class Record:
    """What was launched: by Triton's launchers, of CUDA, and which CUDA kernels were refused, with the reason."""

    triton: list[Launch] = field(default_factory=list)
    cuda: list[CudaLaunch] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def no_nvrtc(*_: Any) -> cuda.Image:
    raise Unavailable("no NVRTC")


@contextlib.contextmanager
def recorded(target: Target, cubin: Callable[..., cuda.Image] = cuda.cubin) -> Iterator[Record]:
    """Write down what is launched, and launch nothing, on a target that is assumed.

    Args:
        cubin: stands in for `kernels.cuda.cubin`.
    """
    found = Record()

    def record(self, device, programs, tensors, numbers, constants, warps):
        found.triton.append(Launch(self, tensors, numbers, constants, warps))

    def compiled(name: str, *arguments: Any) -> cuda.Image:
        try:
            return cubin(name, *arguments)
        except Unavailable as error:
            found.refused[name] = str(error)
            raise

    class Recorded:
        def __init__(self, image: cuda.Image, name: str, shared_bytes: int | None = None):
            shared_bytes = image.shared if shared_bytes is None else shared_bytes
            if shared_bytes > target.device.shared_bytes:
                found.refused[name] = f"{shared_bytes} bytes of shared memory"
                raise Unavailable(f"{name} needs {found.refused[name]}")
            self.launch = CudaLaunch(name, image.code, shared_bytes)
            found.cuda.append(self.launch)

        def __call__(self, blocks, threads, arguments, together=False):
            self.launch.threads.add(threads)

        def check_together(self, blocks, threads):
            self.launch.threads.add(threads)

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(assumed(target.device))
        enter(mock.patch.object(Launcher, "_launch", record))
        for module in modules():
            for name, function in vars(module).items():
                if name.endswith(("_kernel", "_image")) and hasattr(function, "cache_clear"):
                    function.cache_clear()
                    stack.callback(function.cache_clear)
            for name, value in (("Kernel", Recorded), ("cubin", compiled)):
                if hasattr(module, name):
                    enter(mock.patch.object(module, name, value))
        yield found


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
        if self.registers > REGISTERS and device.backend == "cuda":
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
    if target.device.backend == "hip":
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


_nvrtc_of_torch = nvrtc._nvrtc


@functools.cache
def any_nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the wheel nvidia-cuda-nvrtc, which needs no GPU, or of a torch with CUDA; None where there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in Path(folder).glob("cu*/lib/libnvrtc.so.*"):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # which it finds by name alone
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
    try:
        return _nvrtc_of_torch()
    except Unavailable:
        return None


@dataclass
class Row:
    """One kernel on one target: its compiled forms, the most that one takes, and what those that do not run lack."""

    forms: int = 0
    shared_bytes: int = 0
    registers: int = 0
    spilled_bytes: int = 0
    refused: dict[str, list[str]] = field(default_factory=dict)  # reason → classes of cases

    def add(self, taken: Taken, case: str, device: Device) -> None:
        obstacle = taken.obstacle(device)
        refused = {obstacle: [case]} if obstacle else {}
        self.join(Row(1, taken.shared_bytes, taken.registers, taken.spilled_bytes, refused))

    def join(self, other: Row) -> None:
        self.forms += other.forms
        self.shared_bytes = max(self.shared_bytes, other.shared_bytes)
        self.registers = max(self.registers, other.registers)
        self.spilled_bytes = max(self.spilled_bytes, other.spilled_bytes)
        for reason, cases in other.refused.items():
            for case in cases:
                self.refuse(reason, case)

    def sorted(self) -> dict[str, Any]:
        """Fields by name, refusals in one order."""
        return asdict(self) | {"refused": {reason: sorted(cases) for reason, cases in sorted(self.refused.items())}}

    def refuse(self, reason: str, case: str) -> None:
        cases = self.refused.setdefault(reason, [])
        if case not in cases:
            cases.append(case)


def measure(target: Target, cases: Iterable[Case]) -> dict[str, Row]:
    """Every form of every kernel that these cases launch on the target, compiled; CUDA kernels as `cuda/NAME`.

    Cases are run twice, the second time without NVRTC, for what stands in for CUDA kernels.
    """
    rows: dict[str, Row] = {}
    seen = set()

    def row(name: str) -> Row:
        return rows.setdefault(name, Row())

    for case, cubin in itertools.product(cases, (cuda.cubin, no_nvrtc)):
        with recorded(target, cubin) as found:
            case.call()
        for launch in found.triton:
            if launch.key not in seen:
                seen.add(launch.key)
                row(launch.name).add(compile_triton(launch, target), case.name, target.device)
        for built in found.cuda:
            if (key := (built.name, built.image, built.shared_bytes)) not in seen:
                seen.add(key)
                row(f"cuda/{built.name}").add(compile_cuda(built), case.name, target.device)
        if cubin is not no_nvrtc:
            for name, reason in found.refused.items():
                row(f"cuda/{name}").refuse(reason, case.name)
    return rows


HEAD = """# Which kernel runs on which GPU

`python -m benchmarks.kernel_matrix` writes this page. For each architecture it compiles, without a GPU, every kernel
that dispatch would launch there, for the shapes, dtypes, ranks and head sizes that select a variant, and compares the
shared memory and registers of each variant with the device's. `make test` compiles a part again, `make test-all` all.

**Tested by running**: H100 and H200 (sm_90), with `make gpu-test`. **Tested by compiling only**: all others.

A cell means that all variants compile and fit. It gives the largest shared memory of a variant and the bytes that a
thread spills; `-`: dispatch never selects the kernel there. Numbers are variants that do not run, explained below the
table. For these halfbyte logs a notice and runs something slower: the PyTorch reference for a Triton kernel; for a CUDA
kernel (`cuda/`, Hopper and newer) a Triton kernel or a PyTorch matmul. `halfbyte env --kernels --device NAME` prints
which kernel takes which call, and why the others do not.
"""


def rendered(results: dict[str, dict[str, dict[str, Row]]]) -> str:
    """The page."""
    targets = [target for target in TARGETS if target.name in results]
    rows = {target.name: joined(results[target.name]) for target in targets}
    lines = [HEAD, "| kernel | " + " | ".join(f"{t.name}<br>{t.device.name}" for t in targets) + " |"]
    lines.append("|---" * (len(targets) + 1) + "|")
    notes: list[str] = []
    for name in sorted({kernel for kernels in rows.values() for kernel in kernels}):
        cells = [_cell(rows[target.name].get(name), notes) for target in targets]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", *[f"{i}. {note}" for i, note in enumerate(notes, start=1)], "", *_choices(targets)]
    return "\n".join(lines) + "\n"


def _cell(row: Row | None, notes: list[str]) -> str:
    if row is None:
        return "-"
    runs = f"{row.shared_bytes / KIB:.0f} KiB" if row.forms else ""
    if row.spilled_bytes >= SPILLED:
        runs += f", spills {row.spilled_bytes} B"
    numbers = []
    for reason, cases in row.sorted()["refused"].items():
        note = f"{reason}: {', '.join(cases)}"
        if note not in notes:
            notes.append(note)
        numbers.append(f"[{notes.index(note) + 1}]")
    return " ".join([runs, *numbers]).strip()


def _choices(targets: list[Target]) -> Iterator[str]:
    """What ranks 4 to 128 and heads of 64 to 256 take."""

    def ranks(target: Target, dtype: torch.dtype) -> str:
        taken = ranks_in_one_pass(target, dtype)
        return f"to {taken[-1]}" if taken else "none"

    def slots(target: Target, dtype: torch.dtype) -> str:
        return ", ".join(str(slots_of(target, dtype, size)) for size in (64, 128, 256))

    text = "LoRA ranks, from 4, that the gated unit computes in its own pass; higher ranks use separate GEMMs:"
    yield from ("## Ranks and heads", text, *_by_dtype(targets, ranks), "")
    text = "Cache slots that decoding reads per iteration, for head sizes up to 64, 128 and 256:"
    yield from (text, *_by_dtype(targets, slots))


def _by_dtype(targets: list[Target], cell: Callable[[Target, torch.dtype], str]) -> Iterator[str]:
    """A table with a row for 16 bits, another for fp32, and a column a target."""
    yield from ("", "| | " + " | ".join(target.name for target in targets) + " |", "|---" * (len(targets) + 1) + "|")
    for name, dtype in (("16 bits", BF16), ("fp32", FP32)):
        yield f"| {name} | " + " | ".join(cell(target, dtype) for target in targets) + " |"


def ranks_in_one_pass(target: Target, dtype: torch.dtype) -> list[int]:
    """Of 4 to 128."""
    with assumed(target.device):
        return [rank for rank in range(4, 129) if lora_glu.in_one_pass(empty(1, dtype=dtype), rank)]


def slots_of(target: Target, dtype: torch.dtype, size: int) -> int:
    with recorded(target, no_nvrtc) as found:
        attend_call(dtype, size, dtype, None, None)
    return found.triton[0].constants[4]


def measure_part(part: tuple[str, str]) -> tuple[str, str, dict[str, Row]]:
    """The target's name, the group's name, and the rows of that group of cases on that target."""
    name, group = part
    target = next(target for target in TARGETS if target.name == name)
    with mock.patch.object(nvrtc, "_nvrtc", any_nvrtc):
        return name, group, measure(target, CASES[group])


def measure_parts(
    names: Sequence[str], processes: int, groups: Sequence[str] = ()
) -> Iterator[tuple[str, str, dict[str, Row]]]:
    """Yield (target, group of cases, rows) as each is measured: these groups, or all, on the targets of these names."""
    longest_first = sorted(groups or CASES, key=lambda group: -len(CASES[group]))
    parts = [(name, group) for group in longest_first for name in names]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(measure_part, parts)


def joined(groups: dict[str, dict[str, Row]]) -> dict[str, Row]:
    """One row per kernel of a target, from the rows of each group of cases: several groups may launch one kernel."""
    rows: dict[str, Row] = {}
    for group in sorted(groups):
        for kernel, row in groups[group].items():
            rows.setdefault(kernel, Row()).join(row)
    return dict(sorted(rows.items()))


def main() -> None:
    """Measure the targets and the groups of cases named on the command line, or all, and write the page anew.

    Results are kept for each target and group, and written after each, so that an interrupted run loses one group.
    """
    if any_nvrtc() is None:
        raise SystemExit("install nvidia-cuda-nvrtc first: CUDA kernels would have no rows")
    names = [target.name for target in TARGETS if target.name in sys.argv[1:]] or [target.name for target in TARGETS]
    chosen = [group for group in CASES if group in sys.argv[1:]]
    results = read_results()
    for name, group, rows in measure_parts(names, os.cpu_count() or 1, chosen):
        results.setdefault(name, {})[group] = rows
        write_results(results)
        print(name, group, flush=True)
    files.write_text(PAGE, rendered(results))


def read_results() -> dict[str, dict[str, dict[str, Row]]]:
    """Rows of each target, group of cases and kernel, from the results' file."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "{}"
    return {
        name: {group: {kernel: Row(**row) for kernel, row in rows.items()} for group, rows in groups.items()}
        for name, groups in json.loads(text).items()
    }


def write_results(results: dict[str, dict[str, dict[str, Row]]]) -> None:
    """Write the rows of the groups that exist, one kernel a line."""
    lines = []
    for name in sorted(results):
        groups = []
        for group in sorted(results[name].keys() & CASES.keys()):
            rows = results[name][group]
            kernels = [f"   {json.dumps(kernel)}: {json.dumps(rows[kernel].sorted())}" for kernel in sorted(rows)]
            groups.append(f"  {json.dumps(group)}: {{\n" + ",\n".join(kernels) + "\n  }")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(groups) + "\n }")
    files.write_text(RESULTS, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
