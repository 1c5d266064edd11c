"""Fixtures of the autograd tests."""

import pytest
import torch


@pytest.fixture
def nan_in_new_memory():
    """Uninitialized memory is NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
