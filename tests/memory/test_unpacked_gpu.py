"""Runs on rows of many lengths stay within their memory plan and limit."""

import pytest

from tests.helpers.unpacked_runs import RUNS, measured


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.large(12)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_stays_within_its_plan(name):
    numbers = measured(**RUNS[name])
    assert numbers["allocated"] <= 1.07 * numbers["planned"], numbers
    if limit := RUNS[name].get("memory_limit_gib"):
        assert numbers["reserved"] <= limit, numbers
    assert numbers["pinned"] == numbers["pinned_at_half"], numbers
