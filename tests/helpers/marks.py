"""Which cases of a parametrized test `make test` runs; `make test-all` runs all of them."""

import pytest


def slow_except(values, quick):
    """Return `values` for `parametrize`, with those that are not in `quick` marked slow."""
    return [pytest.param(value, marks=[] if value in quick else pytest.mark.slow) for value in values]


def sample(items):
    """Mark as slow what `@pytest.mark.sampled(n)` leaves out: all but one in `n` of a test's cases.

    A case stays where the positions of its parameters add up to a multiple of `n`: the first case stays, and so does
    every value of a parameter if another parameter has `n` values.
    """
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and sum(_positions(item)) % marker.args[0]:
            item.add_marker(pytest.mark.slow)


def _positions(item):
    """The index of the case in each `parametrize`, and in each parametrized fixture."""
    indices = dict(item.callspec.indices)
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        yield indices[names[0]]
        for name in names:
            del indices[name]
    yield from indices.values()
