"""Fixtures of the kernels' tests, and the sampling of the process that interprets Triton kernels."""

import os
from collections import Counter

import pytest

from tests.helpers import emulated


def pytest_collection_modifyitems(config, items):
    """In the process of `test_interpreted`, one of so many cases of each test. Their number is odd, so that of two
    dtypes both are among them."""
    every, seen, left = int(os.environ.get("HALFBYTE_INTERPRET_EVERY", "1")), Counter(), []
    for item in list(items) if every > 1 else ():
        function = item.nodeid.partition("[")[0]
        if "interpret" in item.keywords:
            seen[function] += 1
        if seen[function] % every != 1:
            left.append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


@pytest.fixture(scope="session", autouse=True)
def workshop(tmp_path_factory):
    """What one process has compiled for emulation, the others of this run find."""
    root = tmp_path_factory.getbasetemp()
    emulated.ROOT = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(autouse=True)
def wgmma(request):
    """Two kernels are for compute capability 9.x alone, not for what is newer."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name = getattr(given.get("module"), "__name__", "")
    if given.get("backend") == "hopper" and name.endswith(("cuda.gemm4", "cuda.gemm_planes")):
        import torch

        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs wgmma")


@pytest.fixture(autouse=True)
def no_kernel_is_refused(request):
    """On a GPU a kernel that is refused would pass every comparison with the reference, being it."""
    yield
    if "gpu" in request.node.keywords:
        from halfbyte.utils.notices import notices_so_far

        assert not [text for key, text in notices_so_far().items() if key.startswith("kernel-")]
