"""Gloo ranks, one set of two and one of four shared by all tests of a process."""

from pathlib import Path

import pytest

from tests.helpers.ranks import Ranks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Group all tests of one set of ranks in one xdist worker: starting ranks takes longer than a test."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))


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
