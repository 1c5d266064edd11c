"""Environment of a run: machine, versions, and the choices that depend on them.

`environment()` is printed by `halfbyte env` and stored in environment.json. Unknown facts are None, so that a missing
tool does not hide the others.
"""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from .hardware import chosen_device, compute_dtype

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "triton", "transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes")

# Flags of /proc/cpuinfo that determine fast dtypes → common names.
INSTRUCTION_SETS = {
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "avx512_fp16": "AVX512-FP16",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512-VNNI",
    "avx512f": "AVX512",
    "avx_vnni": "AVX-VNNI",
    "avx2": "AVX2",
    "bf16": "BF16",
    "i8mm": "I8MM",
    "sve": "SVE",
    "asimd": "NEON",
}


def environment(
    device: str | None = None, chosen_dtype: torch.dtype | None = None, key: str = "auto"
) -> dict[str, Any]:
    """Describe this machine as a JSON-serialisable dict.

    Args:
        device: the device a run is configured for; default: the first accelerator, else the CPU.
        chosen_dtype: the run's compute dtype; default: the device's fastest.
        key: the run's `dtype`; unless "auto", it is the reason for the dtype.

    Keys: halfbyte {version, commit}, python, platform, cpu {model, cores, threads, memory_bytes, instruction_sets},
    gpus [{name, memory_bytes, capability, driver}], versions {package: version, and cuda, rocm}, bitsandbytes {mode:
    "install", "override" or "none", real: version of the real package}, device, compute_dtype {dtype, reason}, kernels
    {enabled, reason}. Sizes are in bytes.
    """
    report: dict[str, Any] = {
        "halfbyte": {"version": __version__, "commit": _commit()},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "gpus": [],
        "versions": {name: _version(name) for name in PACKAGES} | {"cuda": None, "rocm": None},
        "bitsandbytes": _bitsandbytes(),
        "device": None,
        "compute_dtype": {"dtype": None, "reason": "torch is not installed"},
        "kernels": {"enabled": False, "reason": "torch is not installed"},
    }
    if find_spec("torch") is None:
        return report
    import torch

    chosen = chosen_device(device)
    choice = compute_dtype(chosen)
    report["versions"] |= {"cuda": torch.version.cuda, "rocm": torch.version.hip}
    report["gpus"] = _gpus()
    report["device"] = str(chosen)
    reason = choice.reason if key == "auto" else f"dtype: {key}"
    report["compute_dtype"] = {"dtype": str(chosen_dtype or choice.dtype).removeprefix("torch."), "reason": reason}
    report["kernels"] = _kernels(chosen)
    return report


def _kernels(device: torch.device) -> dict[str, Any]:
    """Return whether halfbyte's kernels run on `device`, and why."""
    if device.type == "cpu":
        command = compiler()
        if shutil.which(command[0]) is None:
            return {"enabled": False, "reason": f"there is no C compiler ({command[0]}); using the PyTorch reference"}
        return {"enabled": True, "reason": f"in C for quantized weights, built by {command[0]}; the rest is PyTorch"}
    if find_spec("triton") is None:
        return {"enabled": False, "reason": "triton is not installed; using the PyTorch reference"}
    return {"enabled": True, "reason": f"triton {_version('triton') or ''} drives {device.type}".replace("  ", " ")}


def compiler() -> list[str]:
    """Return the command of the C compiler, which need not exist: $CC, else cc."""
    return shlex.split(os.environ.get("CC") or "cc") or ["cc"]


def _bitsandbytes() -> dict[str, Any]:
    """Return which of `install()` and `override()` of halfbyte.bitsandbytes is on, and the real package's version."""
    loaded = sys.modules.get("halfbyte.bitsandbytes.installation")  # not imported: it needs torch
    versions = [distribution.version for distribution in metadata.distributions(name="bitsandbytes")]
    real = next((version for version in versions if not version.endswith("+halfbyte")), None)
    return {"mode": loaded.mode() if loaded else "none", "real": real}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _run(*command: str) -> str | None:
    """Return the stripped output of `command`; None if it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


@functools.cache
def _commit() -> str | None:
    """Return a checkout's git commit when first asked, with -dirty for local changes; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    return _run("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def _cpu() -> dict[str, Any]:
    import psutil
    import torch

    fields = _cpuinfo()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    model = fields.get("model name") or _run("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    return {
        "model": model or None,
        "cores": psutil.cpu_count(logical=False),
        "threads": torch.get_num_threads(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "instruction_sets": [name for flag, name in INSTRUCTION_SETS.items() if flag in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty on systems without it."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(errors="replace").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _gpus() -> list[dict[str, Any]]:
    """Describe every CUDA, ROCm or XPU device that torch sees."""
    import torch

    if torch.cuda.is_available():
        driver = _driver()
        return [_cuda_device(torch.cuda.get_device_properties(index), driver) for index in _each(torch.cuda)]
    if torch.xpu.is_available():
        return [_xpu_device(torch.xpu.get_device_properties(index)) for index in _each(torch.xpu)]
    return []


def _each(module: Any) -> range:
    return range(module.device_count())


def _cuda_device(properties: Any, driver: str | None) -> dict[str, Any]:
    # ROCm names architectures (gfx942); CUDA numbers them (9.0).
    capability = getattr(properties, "gcnArchName", None) or f"{properties.major}.{properties.minor}"
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": capability,
        "driver": driver,
    }


def _xpu_device(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": None,
        "driver": getattr(properties, "driver_version", None),
    }


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, or of amdgpu on ROCm."""
    nvidia = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if nvidia:
        return nvidia.splitlines()[0]
    amd = Path("/sys/module/amdgpu/version")
    return amd.read_text().strip() if amd.exists() else None
