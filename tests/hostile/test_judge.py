"""What `judge` finds wrong in a command's answer: each rule, broken once."""

import pytest

from tests.helpers.hostile.cases import Case, judge
from tests.helpers.hostile.stage import Ended

CASE = Case("a case", "check run.yaml", says="seed", fix="least 0")
GOOD = {"code": 1, "seconds": 0.1, "memory": 10.0, "timed_out": False, "modules": [], "out": b""}
WORDS = "error: run.yaml:3: seed is -1\n  fix: write at least 0\n"
BEFORE = {"run.yaml": "a", "model": "folder"}


def wrong(err: str = WORDS, after: dict | None = None, case: Case = CASE, **ended) -> list[str]:
    return judge(case, Ended(**(GOOD | {"err": err.encode()} | ended)), BEFORE, BEFORE | (after or {}), [])


def test_a_good_answer():
    assert wrong() == []
    assert wrong("a notice\n" + WORDS) == []


@pytest.mark.parametrize(
    ("err", "found"),
    [
        ("Traceback (most recent call last):\n" + WORDS, "Traceback"),
        ("error: this is a bug in halfbyte: seed\n  fix: least 0\n", "bug in halfbyte"),
        (WORDS + WORDS, "2 error lines"),
        ("", "0 error lines"),
        ("error: run.yaml:3: seed is -1\n", "no fix"),
        (WORDS.replace("seed", "r"), "error line without 'seed'"),
        (WORDS.replace("least 0", "most 9"), "fix without 'least 0'"),
        (WORDS.replace("seed", "\x1b[31mseed"), "prints '\\x1b'"),
        (WORDS.replace("seed", "seed\u202e"), "prints '\\u202e'"),
        ("Loading weights: 100%\n" + WORDS, "Loading weights"),
        (WORDS.replace("-1", "9" * 3000), "an error of 3"),
    ],
)
def test_wrong_words(err, found):
    assert any(found in line for line in wrong(err))


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        ({"code": 2}, "exit code 2, not 1"),
        ({"seconds": 3.0}, "took 3.0 s"),
        ({"memory": 2000.0}, "took 2000 MiB"),
        ({"timed_out": True, "code": -9}, "did not end"),
        ({"out": b"a\x07"}, "prints '\\x07'"),
    ],
)
def test_wrong_endings(ended, found):
    assert found in wrong(**ended)


def test_wrong_files():
    assert wrong(after={"out": "folder"}) == ["wrote out"]
    assert wrong(after={"run.yaml": "b"}) == ["wrote run.yaml"]
    written = Case("a case", "train run.yaml", code=0, after=("out/*",))
    good = {"code": 0, "case": written}
    assert wrong("", **good) == ["wrote no out/*"]
    assert wrong("", {"out/adapter": "c"}, **good) == []
    assert wrong("", {"out/.adapter.x1": "c"}, **good) == ["left out/.adapter.x1"]
    assert judge(CASE, Ended(**GOOD, err=WORDS.encode()), BEFORE, {"model": "folder"}, []) == ["removed run.yaml"]
    assert judge(CASE, Ended(**GOOD, err=WORDS.encode()), BEFORE, BEFORE, ["x in TMPDIR"]) == ["left x in TMPDIR"]
