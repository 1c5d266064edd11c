"""Which tests `make test` runs: all quick ones, long ones by turns, some of many cases. `make test-all` runs all."""

import subprocess
from pathlib import Path
from zlib import crc32

import pytest

TURNS = 8  # the long tests of one turn and all quick tests take two cores under eight minutes
LONG = 0.3  # seconds, fixtures included, from which on a test is long
RECORD = Path(__file__).parents[1] / "long.txt"  # lines of seconds and test, which `--record-long` writes


def slow_except(values, quick):
    """Return `values` for `parametrize`, with those that are not in `quick` marked slow."""
    return [pytest.param(value, marks=[] if value in quick else pytest.mark.slow) for value in values]


def sample(items):
    """Mark as slow what `@pytest.mark.sampled(n)` leaves out: all but one in `n` of a test's cases.

    A case stays where the positions of its parameters add up to a multiple of `n`: the first case stays, and so does
    every value of a parameter if another parameter has `n` values.
    """
    seen = {}  # test and axis → position by the identity of the axis' values
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and hasattr(item, "callspec"):  # a module's mark reaches tests of one case, too
            total = 0
            for axis in _axes(item):
                positions = seen.setdefault((item.nodeid.partition("[")[0], axis), {})
                total += positions.setdefault(tuple(id(item.callspec.params[name]) for name in axis), len(positions))
            if total % marker.args[0]:
                item.add_marker(pytest.mark.slow)


def _axes(item):
    """Return the names that each `parametrize` sets, and the name of each parametrized fixture."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [tuple(name.strip() for name in each.split(",")) if isinstance(each, str) else tuple(each) for each in names]
    return axes + [(name,) for name in item.callspec.params if all(name not in axis for axis in axes)]


def recorded() -> dict[str, float]:
    """Return the seconds of each long test, by node id."""
    pairs = (line.split(" ", 1) for line in RECORD.read_text(encoding="utf-8").splitlines())
    return {test: float(seconds) for seconds, test in pairs}


def record(seconds: dict[str, float]) -> None:
    """Write the long tests among those of a run."""
    lines = [f"{spent:.1f} {test}\n" for test, spent in sorted(seconds.items()) if spent >= LONG]
    RECORD.write_text("".join(lines), encoding="utf-8")


def turn_of_commit() -> int:
    """Return the turn of the checked-out commit; 0 without git."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        found = subprocess.run(command, cwd=RECORD.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(found.stdout, 16) % TURNS


def take_turns(items, turn: int) -> None:
    """Mark as slow the long tests of other turns."""
    long = recorded()
    for item in items:
        if item.nodeid in long and crc32(item.nodeid.encode()) % TURNS != turn:
            item.add_marker(pytest.mark.slow)
