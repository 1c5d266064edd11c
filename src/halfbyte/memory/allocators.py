"""Settings of the host's and the device's memory allocators, and the available host memory.

Host. After a block is freed, glibc serves its size from the heap (the mmap threshold grows up to 32 MiB). torch
allocates with `posix_memalign`, which needs extra space for alignment, so a freed hole of the same size is too small to
be reused. A test with 100 blocks of 1 MiB that alternated with freed ones left 100 MiB of holes (1 MiB with `malloc`;
glibc 2.36). `return_large_blocks` fixes the mmap threshold to avoid this.

Measured on the 40M model at 4×512 tokens in fp32 without recomputation: the process grew by 2,255 MB by default, by
2,515 MB with one arena, and by 1,127 MB with the fixed threshold, which equals its live tensors. The cost is page
faults: on two cores of an AMX machine the run made 982 tokens/s with the fixed threshold and 1,589 without. So a run
uses it only if the plan times `HEAP_WASTE` does not fit. `estimate` predicts live tensors. No cheap remedy is known:
`malloc_trim` after each step lowered no peak and took 27% more CPU time; huge pages behind the fixed threshold took as
long as small ones (40M model, 4×512, one core of an EPYC without AMX, 28 Nov 2026).

Device. `memory_cap` enforces `memory_limit_gib` in torch's CUDA allocator, which frees its cache before it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

from ..utils.hardware import free_cached_memory

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")  # version 2
STATUS, CLEAR_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE = 1 << 20  # bytes; size of blocks that glibc returns to the system when they are freed
HEAP_WASTE = 2.7  # largest measured ratio of the heap to live tensors

Result = TypeVar("Result")
FIRST_KERNELS = 256 * 2**20  # device bytes outside torch's allocator for lazily loaded kernels; 0.17 GiB measured


def return_free_memory() -> None:
    """Have glibc return all pages that it holds free to the system; does nothing with another C library.

    For a moment at which much was freed. After each step it costs a quarter of the time and lowers no peak.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # musl, macOS, Windows
        ctypes.CDLL(None).malloc_trim(0)


def return_large_blocks() -> bool:
    """Have glibc return freed blocks of 1 MiB and more to the system immediately, for the whole process.

    Returns:
        False if the C library is not glibc; then nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE))


class ProcessMemory(NamedTuple):
    """Bytes that this process holds now, and at its peak."""

    current: int
    peak: int


def process_memory() -> ProcessMemory:
    """Return the memory that this process holds.

    On Linux, pages of files (libraries, a mapped checkpoint) do not count: the system drops them when it needs their
    memory. It keeps no peak without them, so the pages of files that are mapped now are subtracted.
    """
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
        return ProcessMemory(psutil.Process().memory_info().rss, peak)
    sizes = {name: size.split() for name, _, size in (line.partition(":") for line in lines)}
    now, peak, files = (1024 * int(sizes[name][0]) for name in ("VmRSS", "VmHWM", "RssFile"))
    return ProcessMemory(now - files, peak - files)


def reset_process_peak() -> None:
    """Reset the peak of `process_memory` to what is held now; does nothing where only the system can."""
    with contextlib.suppress(OSError):
        CLEAR_PEAK.write_text("5")  # see proc_pid_clear_refs(5)


def available_bytes() -> int:
    """Bytes of host memory available to this process: the machine's free memory, or the container's remaining limit."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no container, or version 1
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))


@contextlib.contextmanager
def memory_cap(device: torch.device, limit: int | None) -> Iterator[None]:
    """Within the context, cap torch's CUDA allocator at `limit` bytes more than are reserved on entry.

    If an allocation exceeds the cap, the allocator frees cached memory and retries once, then raises
    `torch.OutOfMemoryError`. The CUDA context and library workspaces (about 0.5 GiB) do not count. Does nothing for
    a limit of None and on other devices.
    """
    import torch

    if limit is None or device.type != "cuda":
        yield
        return
    free_cached_memory(device)
    previous = torch.cuda.get_per_process_memory_fraction(device)
    share = (limit + torch.cuda.memory_reserved(device)) / torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(min(share, previous), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(previous, device)


class GraphMemory:
    """Device memory of captured training steps, which evaluation and sampling may need; here, nothing is captured."""

    holds_graphs = False

    def retry_without_graphs(self, work: Callable[[], Result]) -> Result:
        """Run `work` (evaluation or sampling). On out-of-memory, free the captured CUDA graphs and retry once."""
        return work()


@contextlib.contextmanager
def free_stream_caches(graphs: GraphMemory, device: torch.device) -> Iterator[None]:
    """Free torch's cached memory before and after the block, while CUDA graphs are held.

    The allocator caches memory per stream, so the capture stream and the current stream cannot use each other's.
    """
    if graphs.holds_graphs:
        free_cached_memory(device)
    try:
        yield
    finally:
        if graphs.holds_graphs:
            free_cached_memory(device)
