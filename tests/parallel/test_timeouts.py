"""Timeouts of collectives name the missing rank; waits for a working rank have no timeout."""

import re
import time
from datetime import timedelta
from unittest import mock

import pytest

from halfbyte.mesh import timeouts
from halfbyte.utils.errors import TrainingError

pytestmark = pytest.mark.dist
SHORT = {"POLL_INTERVAL": timedelta(seconds=0.1), "TIMEOUT": timedelta(seconds=0.6)}


def one_is_late(mesh, late, seconds):
    """Return the other ranks' error while one rank is late."""
    with mock.patch.multiple(timeouts, **SHORT):
        if mesh.rank == late:
            time.sleep(seconds)
        try:
            return mesh.sum(1)
        except TrainingError as error:  # which ends a run, and its marks with it
            timeouts.rendezvous_store().delete_key(timeouts._key("waiting", mesh.rank))
            return error.message


@pytest.mark.sampled(2)
@pytest.mark.parametrize("late", [0, 1])
def test_missing_rank_is_named(two, late):
    found = two.run(one_is_late, late, 2.0)
    assert found[late] == 2
    assert re.match(rf"process {late} .* 0\.01 minutes", found[1 - late])


@pytest.mark.slow
def test_late_rank_completes_the_collective(two):
    assert two.run(one_is_late, 1, 0.3) == [2, 2]
    assert two.run(one_is_late, 0, 2.0)[1].startswith("process 0 ")


def slow_first(mesh):
    """Run `local_first` for longer than a collective's timeout."""
    made = []

    def make():
        made.append(time.monotonic())
        time.sleep(0 if mesh.rank else 1.0)
        return time.monotonic()

    with mock.patch.multiple(timeouts, **SHORT):
        return mesh.local_first(make), made


def test_local_first_has_no_timeout(two):
    (done, _), (_, others_began) = two.run(slow_first)
    assert len(others_began) == 1
    assert others_began[0] >= done
