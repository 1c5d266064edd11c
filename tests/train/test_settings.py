"""Settings of the process while a run trains."""

from types import SimpleNamespace

import pytest

from halfbyte.memory.allocators import FIRST_KERNELS
from halfbyte.train.setup import memory_limit

GIB = 2**30


@pytest.mark.parametrize(
    ("limit", "hosted", "offloaded", "most"),
    [
        (None, (), (), None),
        (6.5, (), (), int(6.5 * GIB)),
        (None, (3,), (), 20 * GIB - FIRST_KERNELS),
        (None, (), (0, 1), 20 * GIB - FIRST_KERNELS),
    ],
)
def test_offloaded_runs_reserve_memory_for_kernels(limit, hosted, offloaded, most):
    plan = SimpleNamespace(hosted=hosted, offloaded=offloaded, capacity_bytes=20 * GIB)
    run = SimpleNamespace(plan=plan, config=SimpleNamespace(memory_limit_gib=limit))
    assert memory_limit(run) == most
