"""Long tests take turns in `make test`: each runs in one of the turns, quick tests in all."""

from collections import Counter
from types import SimpleNamespace

from tests.helpers import marks


def test_each_long_test_has_one_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(marks, "RECORD", tmp_path / "long.txt")
    seconds = {f"tests/test_a.py::test_b[{n} of 9]": 0.1 + 0.2 * n for n in range(9)}
    marks.record(seconds)
    assert marks.recorded().keys() == {test for test, spent in seconds.items() if spent >= marks.LONG}
    runs = Counter()
    for turn in range(marks.TURNS):
        items = [SimpleNamespace(nodeid=test, marks=[]) for test in seconds]
        for item in items:
            item.add_marker = item.marks.append
        marks.take_turns(items, turn)
        assert all(mark.name == "slow" for item in items for mark in item.marks)
        runs.update(item.nodeid for item in items if not item.marks)
    assert runs == {test: 1 if test in marks.recorded() else marks.TURNS for test in seconds}


def test_turn_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert marks.turn_of_commit() == 0


def test_turn_of_this_checkout():
    assert marks.turn_of_commit() in range(marks.TURNS)
