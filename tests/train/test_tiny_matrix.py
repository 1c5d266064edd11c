"""The matrix of tiny runs: its cases, and what becomes of runs that end well, are refused, or take too long."""

import json

import pytest

from tests.helpers.tiny_cases import Case, Place
from tests.helpers.tiny_matrix import run_all, summary


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
