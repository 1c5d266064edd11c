"""Host memory: how much there is, and how to have it go back when it is freed.

glibc serves a freed size from its heap from then on (the mmap threshold grows up to 32 MiB), and its `posix_memalign`,
by which torch allocates, asks the heap for room to align in: a hole of just that size is too small, so of 100 blocks of
1 MiB, each kept while another beside it came and went, 100 MiB of holes were left (`malloc`: 1; glibc 2.36).

Measured on the 40M model at 4×512 tokens in fp32, activations kept: the process grew by 2,255 MB, with one arena by
2,515, with a fixed threshold by 1,127, which is what its live tensors add up to. The price is page faults: on two cores
of an AMX machine the same run made 982 tokens a second with the fixed threshold and 1,589 without it. So a run uses it
where memory is tight: where the plan times `HEAP_WASTE` would not fit. `estimate` predicts live tensors, which is what
is measured when it is in force.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # version 2

M_MMAP_THRESHOLD = -3  # malloc.h
LARGE = 1 << 20
HEAP_WASTE = 2.7  # the most by which the heap was seen to outgrow live tensors


def return_large_blocks() -> bool:
    """Make this process give freed blocks of 1 MiB and more back to the system at once.

    Returns:
        False where the C library is not glibc, and nothing was done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE))


def available_bytes() -> int:
    """Host memory that this process may still take: what the machine has free, or its container allows."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no container, or version 1
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
