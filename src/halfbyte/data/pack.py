"""Packing: several documents in one row, so that little of a batch is padding.

Best-fit-decreasing: the longest document first, each into the row it leaves the fewest free tokens in. It uses at most
11/9 of the best possible number of rows, plus one (Johnson 1973); on real length distributions it is within a percent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign documents to rows of at most `max_length` tokens.

    Args:
        lengths: tokens of each document, each in 1..max_length.
        max_length: tokens a row may hold.

    Returns:
        The documents' indices, row by row. Within a row they keep their order, and rows are ordered by their first
        document, so that packing does not sort the data by length.

    Raises:
        ValueError: a document does not fit a row.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= max_length:
        raise ValueError(f"lengths must be in 1..{max_length}, not {min(lengths)}..{max(lengths)}")
    rows: list[list[int]] = []
    rows_with: defaultdict[int, list[int]] = defaultdict(list)  # free tokens → rows with exactly so many
    sizes: list[int] = []  # the keys of rows_with, sorted
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(sizes, lengths[document])
        if at < len(sizes):
            free = sizes[at]
            row = rows_with[free].pop()
            if not rows_with[free]:
                sizes.pop(at)
        else:
            free, row = max_length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = free - lengths[document]
        if left and not rows_with[left]:
            insort(sizes, left)
        if left:
            rows_with[left].append(row)
    return sorted(sorted(row) for row in rows)
