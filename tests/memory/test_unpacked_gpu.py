"""Runs on rows of many lengths stay within their memory plan and limit; `unpacked_runs` measures their speed."""

import pytest

from tests.helpers.unpacked_runs import RUNS, measured

STEPS = {"limit6": 40, "rows26": 3, "gemma2": 4, "layers4": 60}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.large(12)
@pytest.mark.parametrize("name", STEPS)
def test_a_run_stays_within_its_plan(name):
    numbers = measured(**RUNS[name] | {"steps": STEPS[name]})
    assert numbers["allocated"] <= 1.07 * numbers["planned"], numbers
    if limit := RUNS[name].get("memory_limit_gib"):
        assert numbers["reserved"] <= limit, numbers
    assert numbers["pinned"] == numbers["pinned_at_half"], numbers
