"""Lets the tests here import the helpers beside them: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest


@pytest.fixture(autouse=True)
def no_kernel_is_refused(request):
    """On a GPU a kernel that is refused would pass every comparison with the reference, being it."""
    yield
    if "gpu" in request.node.keywords:
        from halfbyte.notices import said

        assert not [text for key, text in said().items() if key.startswith("kernel-")]
