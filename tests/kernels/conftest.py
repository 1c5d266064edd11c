"""Make the helper modules of this folder importable: pytest's importlib mode does not change sys.path."""

import os
from collections import Counter

import pytest

from tests.helpers import emulated


def pytest_collection_modifyitems(config, items):
    """In the process of `test_interpreted`, select every n-th case of each test. n is odd, so that both of two dtypes
    are selected."""
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
    """Share libraries compiled for emulation among the processes of a run."""
    root = tmp_path_factory.getbasetemp()
    emulated.ROOT = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(autouse=True)
def wgmma(request):
    """Skip kernels that need wgmma, which only compute capability 9.x has."""
    given = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    needs = getattr(given.get("module"), "__name__", "").endswith("cuda.gemm4") or given.get("kernel") == "gemm64"
    if given.get("backend") == "hopper" and needs:
        import torch

        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs wgmma")


@pytest.fixture(autouse=True)
def no_kernel_is_refused(request):
    """Fail if a kernel was unavailable on a GPU: the comparison would be of the reference with itself."""
    yield
    if "gpu" in request.node.keywords:
        from halfbyte.utils.notices import notices_so_far

        assert not [text for key, text in notices_so_far().items() if key.startswith("kernel-")]
