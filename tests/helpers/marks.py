"""Which tests `make test` runs: all but those marked slow, and of some tests a sample of the cases."""

import pytest


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
    axes = [tuple(n.strip() for n in axis.split(",")) if isinstance(axis, str) else tuple(axis) for axis in names]
    return axes + [(name,) for name in item.callspec.params if all(name not in axis for axis in axes)]
