"""Gloo ranks, one set of two and one of four for all tests of a process."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
