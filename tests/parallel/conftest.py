"""Gloo ranks, one set of two and one of four shared by all tests of a process."""

import contextlib

import pytest

from tests.helpers.ranks import Ranks

HERE = "tests/parallel/"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Group all tests of one set of ranks in one xdist worker: starting ranks takes longer than a test.

    Four ranks start for half a minute on two cores: their tests are slow.
    """
    for item in items:
        if item.nodeid.startswith(HERE):
            item.add_marker(pytest.mark.xdist_group("ranks"))
            if "four" in item.fixturenames:
                item.add_marker(pytest.mark.slow)


_started: list[Ranks] = []


def pytest_runtest_teardown(nextitem):
    """Stop the ranks after the folder's last test: gloo's threads poll as long as they live."""
    if nextitem is None or not nextitem.nodeid.startswith(HERE):
        for ranks in _started:
            ranks.close()


@contextlib.contextmanager
def _shared(size):
    ranks = Ranks(size)
    _started.append(ranks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two():
    with _shared(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four():
    with _shared(4) as ranks:
        yield ranks
