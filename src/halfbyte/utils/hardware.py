"""Hardware: the training device, its compute dtype and memory, CUDA captures, and settings of allocators and oneDNN.

Imports torch only inside functions, so that the command line starts quickly.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ComputeDtype:
    """Compute dtype and the reason for it, for the header of a run."""

    dtype: torch.dtype
    reason: str


EXPANDABLE, FIXED = "expandable_segments:True", "expandable_segments:False"


def enable_expandable_segments() -> None:
    """Enable expandable segments of torch's CUDA allocator, unless configured by the user; call it before GPU use.

    With fixed segments, activations of many sizes fragment memory: 1.0 GiB of 8 in a run that then ran out
    (docs/what-did-not-work.md).
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", EXPANDABLE)


def has_expandable_segments() -> bool:
    """Return whether expandable segments are enabled."""
    return any(EXPANDABLE in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


@contextlib.contextmanager
def fixed_segments(device: torch.device) -> Iterator[None]:
    """Within the context, torch allocates on a CUDA device in segments that are not expandable.

    Other processes can map their memory with CUDA IPC handles (`mesh.peer_memory`). Expandable segments are shared
    as file descriptors, one per 20 MiB, which containers isolate (pytorch#165685). torch does not reuse expandable
    segments while the setting is off; it has no public function to change it (torch 2.11 to 2.13).
    """
    import torch

    if device.type != "cuda" or not has_expandable_segments():
        yield
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = next(text for text in map(os.environ.get, names) if text and EXPANDABLE in text)
    change(settings.replace(EXPANDABLE, FIXED))  # the full setting: torch resets options that it does not name
    try:
        yield
    finally:
        change(settings)


CUDA_CONTEXT = 600 << 20  # bytes that a process takes of a GPU before it allocates
CACHED_PRIMITIVES = 128  # several times the number for one batch shape


def limit_primitive_caches() -> None:
    """Limit the caches of oneDNN and ideep, unless the user has; call it before torch's first matmul.

    Each caches 1,024 compiled GEMMs of 0.9 MiB, and a batch of another length adds 23 (docs/what-did-not-work.md).
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED_PRIMITIVES))


def best_device() -> torch.device:
    """Return the first accelerator torch sees (CUDA or ROCm, then XPU), else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    return torch.device("cpu")


def chosen_device(name: str | torch.device | None) -> torch.device:
    """Return the device of this name, with an index ("cuda" is the current one); None: `best_device`.

    Raises:
        ConfigError: the device does not exist.
    """
    import torch

    from .errors import ConfigError

    if name is None:
        return best_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: {error}".splitlines()[0], "name cpu, cuda, cuda:1 or xpu") from error
    if device.type not in ("cuda", "xpu"):
        return device
    module = getattr(torch, device.type)
    if not module.is_available() or (device.index or 0) >= module.device_count():
        raise ConfigError(
            f"device {name!s} does not exist: torch sees {module.device_count()} {device.type} devices",
            "remove the key device",
        )
    return torch.device(device.type, module.current_device() if device.index is None else device.index)


# Values of ONEDNN_MAX_CPU_ISA, from the oldest; torch uses oneDNN for matmuls on x86 CPUs.
ONEDNN_LEVELS = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"),
)


def _onednn_may_use(level: str) -> bool:
    """Return whether ONEDNN_MAX_CPU_ISA allows an instruction set; unset or unknown values allow all."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return limit not in ONEDNN_LEVELS or ONEDNN_LEVELS.index(limit) >= ONEDNN_LEVELS.index(level)


@functools.cache
def _is_amd() -> bool:
    """Return whether the CPU is one of AMD's."""
    info = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (info.read_text(errors="replace") if info.exists() else platform.processor())


@functools.cache
def onednn_beats_mkl() -> bool:
    """Return whether to use oneDNN for float32 matmuls on this CPU instead of MKL, which torch uses.

    On AMD processors MKL runs AVX2 code, whatever they support, and oneDNN AVX-512: 230 against 105 GFLOP/s on a core
    of an EPYC with full-width units. torch has no public setting for float32 (2.11 to 2.15). The oneDNN
    3.10 of torch 2.11 is left out: its sums of a row depend on the number of rows.
    """
    import torch

    return (
        _is_amd()
        and torch.__version__ >= "2.12"
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _onednn_may_use("AVX512_CORE")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


_capture_streams: dict[int, torch.cuda.Stream] = {}


def capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all CUDA graph captures on a GPU: cuBLAS allocates 64 MiB for each stream it has seen."""
    import torch

    if device not in _capture_streams:
        _capture_streams[device] = torch.cuda.Stream(device)
    return _capture_streams[device]


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, on this thread's stream or by any thread on a `capture_stream`."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    for stream in _capture_streams.values():
        with torch.cuda.stream(stream):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def free_cached_memory(device: torch.device) -> None:
    """Synchronize the device, then free the cached memory of torch's allocator.

    torch unmaps an expandable segment after synchronizing the segment's stream only. Memory freed there may still be
    read on another stream, which would be an illegal memory access.
    """
    import torch

    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize(device)
        module.empty_cache()


def free_bytes(device: torch.device, processes: int = 1) -> int:
    """Return the free bytes of `device`; on a CPU, one process's part of the host's free memory."""
    import psutil
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        return reservable_bytes(device)
    if device.type == "xpu" and torch.xpu.is_available():
        return torch.xpu.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available) // processes


def device_bytes(device: torch.device) -> int:
    """Return the bytes of `device` that one process could use if no other one did."""
    import psutil
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory - CUDA_CONTEXT
    if device.type == "xpu" and torch.xpu.is_available():
        return torch.xpu.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def reservable_bytes(device: torch.device) -> int:
    """Return the bytes that torch's allocator may still reserve on a CUDA device, within its memory fraction."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index)) - torch.cuda.memory_reserved(index)
    return min(free, allowed)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error` or its cause is out of memory, on a device or the host."""
    import torch

    if error is None:
        return False
    messages = (
        "can't allocate memory",
        "out of memory",
        "STATUS_ALLOC_FAILED",
    )  # the CPU allocator, CUDA, CUDA libraries
    typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    named = isinstance(error, RuntimeError) and any(words in str(error) for words in messages)
    return typed or named or is_out_of_memory(error.__cause__ or error.__context__)


def compute_dtype(device: torch.device) -> ComputeDtype:
    """Return bfloat16 if `device` has fast native matmuls, otherwise float16 (older GPUs) or float32 (other CPUs).

    bf16 matmuls were measured 6-15 times faster than fp32 on CPUs with AMX, 1.2 to 3.6 times *slower* on an Intel Xeon
    with AVX512-BF16 alone, and 5 times slower on a CPU with neither, so the choice depends on the instruction set.

    A GPU that is only planned for, on a machine without one, is assumed to have bfloat16.
    """
    import torch

    if device.type == "cuda" and not torch.cuda.is_available():
        return ComputeDtype(torch.bfloat16, "this machine has no GPU to query")
    if device.type == "cuda":
        # Not torch.cuda.is_bf16_supported, which asks the current device.
        if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
            return ComputeDtype(torch.bfloat16, f"{torch.cuda.get_device_name(device)} multiplies bf16 natively")
        return ComputeDtype(torch.float16, f"{torch.cuda.get_device_name(device)} has no bf16 units")
    if device.type == "xpu":
        return ComputeDtype(torch.bfloat16, "XPU multiplies bf16 natively")
    if torch.cpu._is_amx_tile_supported() and _onednn_may_use("AVX512_CORE_AMX"):
        return ComputeDtype(torch.bfloat16, "the CPU has AMX")
    if _is_amd() and torch.cpu._is_avx512_bf16_supported() and _onednn_may_use("AVX512_CORE_BF16"):
        return ComputeDtype(torch.bfloat16, "the CPU has AMD's AVX512-BF16")
    reason = "the CPU has neither AMX nor AMD's AVX512-BF16, so bf16 would be slower than fp32"
    return ComputeDtype(torch.float32, reason)
