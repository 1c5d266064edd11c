"""benchmarks.loading: the checkpoint that it writes, its digests of pieces, and its bars."""

import torch

from benchmarks import loading


def test_host_peak_sees_memory_that_is_freed_again():
    with loading.HostPeak() as host:
        block = torch.ones(2**26, dtype=torch.uint8)
        loading.time.sleep(0.1)
        del block
    assert host.peak - host.before > 0.9 * 2**26
