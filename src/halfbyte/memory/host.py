"""Host memory that goes back when it is freed.

glibc serves a freed size from its heap from then on (the mmap threshold grows up to 32 MiB), and a heap whose blocks
die in another order than they came leaves holes. Measured on the 40M model at 4×512 tokens in fp32, activations kept:
the process grew by 2,255 MB, with one arena by 2,515, with a fixed threshold by 1,127, which is what its live tensors
add up to. The price is page faults: on two cores of an AMX machine the same run made 982 tokens a second with the fixed
threshold and 1,589 without it. So a run uses it where memory is tight: where the plan times `HEAP_WASTE` would not fit.
`estimate` predicts live tensors, which is what is measured when it is in force.
"""

from __future__ import annotations

import ctypes

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
