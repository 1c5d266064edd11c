"""The matrix of tiny runs: its cases, and what becomes of runs that end well, are refused, or take too long."""

import json

import pytest

from tests.helpers.tiny_cases import FAMILIES, FORMATS, METHODS, OPTIONS, Case, Place, cases
from tests.helpers.tiny_matrix import run_all, summary


def test_every_case_has_a_name_of_its_own():
    found = list(cases())
    assert (len(FAMILIES), len(METHODS), len(FORMATS), len(OPTIONS)) == (32, 10, 22, 45)
    assert len({case.name for case in found}) == len(found) == 32 * 10 + 22 + 45


@pytest.mark.slow
def test_each_case_has_its_result(tmp_path):
    place = Place(tmp_path)
    place.write_rows()
    wanted = [Case("good"), Case("refused", keys={"method": "gkd", "packing": True}), Case("bad", "Nonesuch")]
    found = {result["case"]: result for result in map(json.loads, map(json.dumps, run_all(wanted, place, 1, 600)))}
    assert {name: result["outcome"] for name, result in found.items()} == {
        "good": "ok", "refused": "refused", "bad": "failed",
    }  # fmt: skip
    assert found["refused"]["error"] == "ConfigError"
    assert found["bad"]["error"] == "AttributeError"  # transformers has no such family
    assert found["good"]["seconds"] > 0
    assert summary([*found.values()], 1.0).startswith("1 ok, 1 refused, 1 failed")


@pytest.mark.slow
def test_a_case_that_takes_too_long_is_a_failure_and_the_next_one_runs(tmp_path):
    place = Place(tmp_path)
    place.write_rows()
    found = list(run_all([Case("first"), Case("second")], place, 1, 0.1))
    assert [(result["case"], result["error"]) for result in found] == [("first", "Timeout"), ("second", "Timeout")]
