"""The real package is compared with only where its CPU library is right; see `tests.helpers.real_bnb`."""

import importlib.util

import pytest

from tests.helpers import real_bnb


@pytest.fixture(autouse=True, scope="session")
def _settled():
    if importlib.util.find_spec("bitsandbytes") is not None:
        real_bnb.settle()
