"""Run the test suite as older CPUs would: `python -m tests.helpers.cpus [VARIANT ...] [-- pytest's arguments]`.

Instruction sets are taken away from everything that asks for them: torch's own loops (ATEN_CPU_CAPABILITY), oneDNN's
matrix products (ONEDNN_MAX_CPU_ISA, which halfbyte's choice of a dtype follows) and the C kernels (`-march`, by a
compiler that adds it). What cannot be taken away: MKL and bitsandbytes choose by the processor itself. Each variant
runs with the torch threads it names, so that both 1 and 2 occur.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "not slow and not gpu", "-q"]


@dataclass(frozen=True)
class Cpu:
    """A kind of CPU: what torch, oneDNN and the C compiler may use, and the flag of /proc/cpuinfo that it needs."""

    flag: str
    aten: str
    onednn: str
    march: str
    threads: int


CPUS = {
    "avx2": Cpu("avx2", "avx2", "AVX2", "x86-64-v3", 1),
    "avx512": Cpu("avx512f", "avx512", "AVX512_CORE", "x86-64-v4", 2),
    "avx512-bf16": Cpu("avx512_bf16", "avx512", "AVX512_CORE_BF16", "cooperlake", 1),
    "amx": Cpu("amx_bf16", "avx512", "AVX512_CORE_AMX", "sapphirerapids", 2),
}


def flags() -> set[str]:
    """Return this processor's flags from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


def variables(name: str, folder: Path) -> dict[str, str]:
    """The environment in which this machine is that CPU; writes the compiler into `folder`."""
    cpu = CPUS[name]
    compiler = folder / f"cc-{cpu.march}"
    folder.mkdir(parents=True, exist_ok=True)
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "cc")} "$@" -march={cpu.march}\n')
    compiler.chmod(0o755)
    return {
        "ATEN_CPU_CAPABILITY": cpu.aten,
        "ONEDNN_MAX_CPU_ISA": cpu.onednn,
        "CC": str(compiler),
        "OMP_NUM_THREADS": str(cpu.threads),
    }


def main(arguments: list[str]) -> int:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, chosen = arguments[:split] or list(CPUS), arguments[split + 1 :]
    here, failed = flags(), []
    for name in names:
        if CPUS[name].flag not in here:
            print(f"{name}: not run, this processor has no {CPUS[name].flag}", flush=True)
            continue
        print(f"{name}: {CPUS[name]}", flush=True)
        environment = os.environ | variables(name, ROOT / "build")
        if subprocess.run([sys.executable, *DEFAULT, *chosen], cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all variants that this processor has passed")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
