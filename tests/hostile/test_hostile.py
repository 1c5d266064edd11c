"""Run every row of `tests/helpers/hostile/rows_*.py`, as `cases.py` there describes: one command with bad input."""

import importlib
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import hostile
from tests.helpers.hostile.cases import Case, judge, place, snapshot
from tests.helpers.hostile.stage import Ended, Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")

SUBJECTS = sorted(path.stem for path in Path(hostile.__file__).parent.glob("rows_*.py"))

SHARE = 10  # `make test` runs one of so many cases of a subject, `make slow-tests` the others


def parameters() -> list:
    """Return every command of every case; of several that must answer alike `make test` runs the first."""
    made = []
    for subject in SUBJECTS:
        for number, case in enumerate(importlib.import_module(f"{hostile.__name__}.{subject}").ROWS):
            for position, command in enumerate(case.commands()):
                name = f"{case.name} [{command[0] if command else ''}]" if isinstance(case.run, tuple) else case.name
                name = f"{subject.removeprefix('rows_')}: {name}".encode("unicode_escape").decode()
                slow = case.slow or position or number % SHARE
                made.append(pytest.param(case, command, id=name, marks=[pytest.mark.slow] if slow else []))
    return made


@pytest.mark.parametrize(("case", "command"), parameters())
def test_hostile(case: Case, command, stage, base, environment, record_property):
    ended, wrong = _attempt(case, command, stage, base, environment)
    if ended.seconds / stage.slowness > case.most_seconds:  # other machines on this host can slow one command
        ended, wrong = _attempt(case, command, stage, base, environment)
    record_property("seconds", f"{ended.seconds:.2f}")  # in --junitxml; without other processes' load
    streams = f"--- stdout\n{_shown(ended.out)}\n--- stderr\n{_shown(ended.err)}"
    if "HOSTILE_SHOW" in os.environ:
        print(f"\n{case.name}: exit {ended.code}, {ended.seconds:.2f} s, {ended.memory:.0f} MiB\n{streams}")
    if wrong:
        pytest.fail(f"{'; '.join(wrong)}\n--- command\nhalfbyte {' '.join(command)}\n{streams}", pytrace=False)


def _attempt(case: Case, command: list[str], stage: Stage, base: Path, environment: dict) -> tuple[Ended, list[str]]:
    """Run the command in a new folder with the case's files; what it did, and everything wrong with that."""
    room = Path(tempfile.mkdtemp(prefix="hostile-"))
    folder, scratch, temporary = (room / name for name in ("case", "scratch", "tmp"))
    for path in (folder, scratch, temporary):
        path.mkdir()
    try:
        place(case, folder, base)
        theirs = environment | {"TMPDIR": str(temporary)} | case.environment
        wishes = {"environment": {key: value for key, value in theirs.items() if value is not None}, **case.wishes}
        wishes.setdefault("limit", 8 * case.seconds)
        if case.first:
            first = stage.run(case.first.split(), folder, scratch, environment=environment)
            assert first.code == 0, first.err.decode()
        before = snapshot(folder)
        ended = stage.run(command, folder, scratch, **wishes)
        left = [f"{name} in TMPDIR" for name in os.listdir(temporary) if not name.startswith("torchinductor")]
        same_machine = replace(ended, seconds=ended.seconds / stage.slowness)
        return ended, judge(case, same_machine, before, snapshot(folder), left)
    finally:
        for path in room.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(room)


def _shown(stream: bytes) -> str:
    text = stream.decode("utf-8", "backslashreplace")
    return text if len(text) < 4000 else f"{text[:2000]}\n[...]\n{text[-2000:]}"
