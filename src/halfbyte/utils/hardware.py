"""What this machine can do: the device to train on and the dtype its arithmetic is fast in.

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
    """A dtype and the reason it was chosen, for the header of a run."""

    dtype: torch.dtype
    reason: str


GROWING, FIXED = "expandable_segments:True", "expandable_segments:False"


def let_segments_grow() -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has set it up: activations of many sizes leave gaps
    in fixed ones, 1.0 GiB of 8 in a run that then had no room (docs/log/). It counts before torch uses a GPU."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", GROWING)


def segments_grow() -> bool:
    """Whether they do."""
    return any(GROWING in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))


@contextlib.contextmanager
def fixed_segments(device: torch.device) -> Iterator[None]:
    """Inside, what torch allocates on a CUDA device lies in segments that do not grow.

    Other processes may read there by CUDA's plain handles (`parallel.peer_memory`). Those of a growing segment are file
    descriptors, one for every 20 MiB, which containers keep from each other (pytorch#165685). torch leaves growing
    segments aside while the setting is off; it has no public name to change it by (torch 2.11 to 2.13).
    """
    import torch

    if device.type != "cuda" or not segments_grow():
        yield
        return
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    asked = next(text for text in map(os.environ.get, names) if text and GROWING in text)
    change(asked.replace(GROWING, FIXED))  # all of it: what a text does not name goes back to torch's default
    try:
        yield
    finally:
        change(asked)


KEPT_PRIMITIVES = 128  # several times what one shape of batch needs


def bound_cpu_primitives() -> None:
    """Let oneDNN and ideep keep few compiled products, unless the user has set it up: each of their caches takes 1,024,
    0.9 MiB a piece, and a batch of another length needs 23 more (docs/log/). It counts before torch multiplies."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_PRIMITIVES))


def best_device() -> torch.device:
    """The first accelerator torch sees (CUDA or ROCm, then XPU), else the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    return torch.device("cpu")


def chosen_device(name: str | torch.device | None) -> torch.device:
    """The device of that name, with an index ("cuda" is the current one); None: `best_device`.

    Raises:
        ConfigError: no such device here.
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
            f"device {name!s} is not here: torch sees {module.device_count()} {device.type} devices", "leave device out"
        )
    return torch.device(device.type, module.current_device() if device.index is None else device.index)


# What ONEDNN_MAX_CPU_ISA can say, from the oldest on; oneDNN is what multiplies matrices on x86 CPUs.
ONEDNN_LEVELS = (
    *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
    *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16"),
)


def _onednn_may_use(level: str) -> bool:
    """Whether ONEDNN_MAX_CPU_ISA leaves oneDNN that instruction set; unset, or anything newer, leaves it all."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return limit not in ONEDNN_LEVELS or ONEDNN_LEVELS.index(limit) >= ONEDNN_LEVELS.index(level)


@functools.cache
def onednn_beats_mkl() -> bool:
    """Whether oneDNN multiplies float32 matrices faster here than MKL, which torch has do it.

    MKL runs AVX2 code on AMD's processors, whatever they have, and oneDNN AVX-512: 230 against 105 GFLOP/s on a core of
    an EPYC with full-width units (docs/log/). torch has no public way to say so for float32 (2.11 to 2.13).
    """
    import torch

    info = Path("/proc/cpuinfo")
    vendor = info.read_text(errors="replace") if info.exists() else platform.processor()
    return (
        "AuthenticAMD" in vendor
        and torch.backends.mkl.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and _onednn_may_use("AVX512_CORE")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


_capture_streams: dict[int, torch.cuda.Stream] = {}


def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures of CUDA graphs on a GPU: cuBLAS keeps 64 MiB for each stream it has met."""
    import torch

    if device not in _capture_streams:
        _capture_streams[device] = torch.cuda.Stream(device)
    return _capture_streams[device]


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured: on this thread's stream, or by any thread on a `capture_stream`."""
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
    """Give back what torch's allocator caches of a GPU's memory, once nothing that was launched uses it.

    torch unmaps an expandable segment after waiting for the stream that it belongs to. What was allocated there and
    freed may still be read on another stream, where that wait alone ends in an illegal memory access.
    """
    import torch

    if device.type != "cpu":
        module = torch.get_device_module(device)
        module.synchronize(device)
        module.empty_cache()


def free_bytes(device: torch.device, processes: int = 1) -> int:
    """Of `device` now; of a CPU's memory, which the processes of a host share, the part of one."""
    import psutil
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        return reservable_bytes(device)
    if device.type == "xpu" and torch.xpu.is_available():
        return torch.xpu.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available) // processes


def reservable_bytes(device: torch.device) -> int:
    """Of a CUDA device that torch's allocator may still take: what is free there, and left of this process's share."""
    import torch

    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    allowed = int(total * torch.cuda.get_per_process_memory_fraction(index)) - torch.cuda.memory_reserved(index)
    return min(free, allowed)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it came from, says that a device's or the host's memory ran out."""
    import torch

    if error is None:
        return False
    said = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")  # a CPU's allocator, CUDA, its libraries
    typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    told = isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    return typed or told or is_out_of_memory(error.__cause__ or error.__context__)


def compute_dtype(device: torch.device) -> ComputeDtype:
    """bfloat16 where `device` multiplies it natively; otherwise float16 (older GPUs) or float32 (older CPUs).

    bf16 matrix products were measured 6-15 times faster than fp32 on CPUs with AMX, and 5 times *slower* on a CPU
    that has neither AMX nor AVX512-BF16 (docs/log/), so the choice is by instruction set, never by default.

    A GPU that is only planned for, on a machine without any, is taken to have bfloat16.
    """
    import torch

    if device.type == "cuda" and not torch.cuda.is_available():
        return ComputeDtype(torch.bfloat16, "there is no GPU here to ask")
    if device.type == "cuda":
        # Not torch.cuda.is_bf16_supported, which asks the current device.
        if torch.version.hip or torch.cuda.get_device_capability(device) >= (8, 0):
            return ComputeDtype(torch.bfloat16, f"{torch.cuda.get_device_name(device)} multiplies bf16 natively")
        return ComputeDtype(torch.float16, f"{torch.cuda.get_device_name(device)} has no bf16 units")
    if device.type == "xpu":
        return ComputeDtype(torch.bfloat16, "XPU multiplies bf16 natively")
    if torch.cpu._is_amx_tile_supported() and _onednn_may_use("AVX512_CORE_AMX"):
        return ComputeDtype(torch.bfloat16, "the CPU has AMX")
    if torch.cpu._is_avx512_bf16_supported() and _onednn_may_use("AVX512_CORE_BF16"):
        return ComputeDtype(torch.bfloat16, "the CPU has AVX512-BF16")
    return ComputeDtype(torch.float32, "the CPU has neither AMX nor AVX512-BF16, so bf16 would be slower than fp32")
