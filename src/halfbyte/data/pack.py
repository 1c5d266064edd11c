"""Packing: several documents in one row, so that little of a batch is padding.

Best-fit-decreasing: the longest document first, each into the row it leaves the least room in. It uses at most 11/9 of
the best possible number of rows, plus one (Johnson 1973); on real length distributions it is within a percent.
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
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # free tokens → rows with exactly that much room
    rooms: list[int] = []  # the keys of with_room, sorted
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect_left(rooms, lengths[document])
        if at < len(rooms):
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(at)
        else:
            room, row = max_length, len(rows)
            rows.append([])
        rows[row].append(document)
        left = room - lengths[document]
        if left and not with_room[left]:
            insort(rooms, left)
        if left:
            with_room[left].append(row)
    return sorted(sorted(row) for row in rows)
