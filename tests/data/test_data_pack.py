"""Packing: every document once, no row too long, and few rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.data.tables import pack


def first_fit(lengths, max_length):
    rooms = []
    for length in lengths:
        at = next((i for i, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(max_length - length)
        else:
            rooms[at] -= length
    return len(rooms)


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(64, 100))
def test_pack(lengths, max_length):
    rows = pack(lengths, max_length)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    filled = [sum(lengths[document] for document in row) for row in rows]
    assert max(filled, default=0) <= max_length
    # No two rows would fit into one: each document found no room in the rows before its own.
    assert all(a + b > max_length for a, b in zip(sorted(filled), sorted(filled)[1:], strict=False))
    assert rows == sorted(sorted(row) for row in rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mean", [60, 200, 700])
def test_no_more_rows_than_first_fit_on_realistic_lengths(seed, mean):
    """Log-normal lengths, as in chat data; in theory some orders favour first-fit, so the lengths are fixed."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean), 0.6, 1000).astype(int).clip(1, 2048).tolist()
    rows = pack(lengths, 2048)
    assert len(rows) <= first_fit(lengths, 2048)
    if mean == 200:
        assert sum(lengths) / (len(rows) * 2048) > 0.98


def test_best_fit_is_chosen():
    assert pack([10, 10], 10) == [[0], [1]]
    assert pack([6, 7, 3, 4], 10) == [[0, 3], [1, 2]]
    assert pack([], 10) == []


@pytest.mark.parametrize("length", [0, 11])
def test_length_out_of_range_is_refused(length):
    with pytest.raises(ValueError, match=r"1\.\.10"):
        pack([5, length], 10)
