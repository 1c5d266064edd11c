"""Datasets that are created in memory: making, packing and hashing them.

datasets fingerprints a new dataset by pickling everything it was made from, including rows and library modules, which
fails for libraries outside of Python's own folders. Nothing created here is cached on disk, so each table gets a random
fingerprint instead.

Packing is best-fit-decreasing: the longest document first, each into the row where it leaves the fewest free tokens. It
uses at most 11/9 of the optimal number of rows, plus one (Johnson 1973); on real length distributions it is within one
percent.
"""

from __future__ import annotations

import hashlib
import uuid
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from datasets import Dataset

from ..utils.streams import no_dataset_bars
from .images import IMAGES

HASHED_AT_ONCE = 4096  # rows per block


def with_column(rows: Dataset, name: str, values: Any, feature: Any = None) -> Dataset:
    """Return `rows` with a further column, in the same format.

    Args:
        values: a list or an array, a value for each row.
        feature: datasets' type of the column; None: inferred.
    """
    shown = rows.format
    rows = rows.with_format(None)  # of a selection, add_column would store the values that a transform makes
    with no_dataset_bars():  # for copying the selected rows
        rows = rows.add_column(name, values, new_fingerprint=uuid.uuid4().hex, feature=feature)
    return rows.with_format(shown["type"], **shown["format_kwargs"])


def digest_of_rows(rows: Dataset) -> str:
    """Return the SHA-256 of a table's columns with their names and types, independent of its chunks."""
    digest = hashlib.sha256()
    plain = rows.with_format("arrow")
    for first in range(0, len(rows), HASHED_AT_ONCE):
        table = plain[first : first + HASHED_AT_ONCE].combine_chunks().replace_schema_metadata(None)
        table = table.select(sorted(table.column_names))
        if IMAGES in table.column_names:  # a moved file is the same image
            images = [[image["sha256"] for image in row] for row in table[IMAGES].to_pylist()]
            table = table.set_column(table.column_names.index(IMAGES), IMAGES, [images])
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema) as stream:
            stream.write_table(table)
        digest.update(buffer.getvalue())
    return digest.hexdigest()


class Table(Dataset):
    """A `Dataset` whose contents are not hashed on creation, as in `Table.from_dict`."""

    def __init__(
        self, arrow_table: Any, info: Any = None, split: Any = None, indices_table: Any = None,
        fingerprint: str | None = None,
    ):  # fmt: skip
        super().__init__(arrow_table, info, split, indices_table, fingerprint or uuid.uuid4().hex)


# --- packing ----------------------------------------------------------------------------------------------------------


def pack(
    lengths: Sequence[int], max_length: int, pixels: Sequence[int] | None = None, max_pixels: int = 0
) -> list[list[int]]:
    """Assign documents to rows of at most `max_length` tokens, and of at most `max_pixels` pixels.

    Documents with pixels are placed first, so that documents of text fill the rows that can hold no more pixels.

    Args:
        lengths: tokens of each document, each in 1..max_length.
        max_length: tokens that a row may hold.
        pixels: pixels of each document, each in 0..max_pixels; None: only tokens count.
        max_pixels: pixels that a row may hold.

    Returns:
        The documents' indices, row by row. Documents stay in order within a row, and rows are ordered by their first
        document, so packing does not sort the data by length.

    Raises:
        ValueError: a document does not fit a row.
    """
    if lengths and not 1 <= min(lengths) <= max(lengths) <= max_length:
        raise ValueError(f"lengths must be in 1..{max_length}, not {min(lengths)}..{max(lengths)}")
    if pixels is None:
        return sorted(sorted(row) for row in _best_fit(lengths, max_length, range(len(lengths)), []))
    if pixels and not max(pixels) <= max_pixels:
        raise ValueError(f"pixels must be in 0..{max_pixels}, not {max(pixels)}")
    rows = _best_fit_of_pixels(lengths, max_length, pixels, max_pixels)
    texts = [index for index in range(len(lengths)) if not pixels[index]]
    return sorted(sorted(row) for row in _best_fit(lengths, max_length, texts, rows))


def _best_fit(
    lengths: Sequence[int], max_length: int, documents: Sequence[int], rows: list[list[int]]
) -> list[list[int]]:
    """Add `documents` to `rows`, and return them."""
    rows_with: defaultdict[int, list[int]] = defaultdict(list)  # free tokens → rows
    for row, indices in enumerate(rows):
        rows_with[max_length - sum(lengths[index] for index in indices)].append(row)
    rows_with.pop(0, None)
    sizes = sorted(rows_with)
    for document in sorted(documents, key=lambda index: (-lengths[index], index)):
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
    return rows


def _best_fit_of_pixels(
    lengths: Sequence[int], max_length: int, pixels: Sequence[int], max_pixels: int
) -> list[list[int]]:
    """Return rows of the documents with pixels. A row that cannot hold the smallest of them is closed, so that few rows
    are searched for each document."""
    images = [index for index in range(len(lengths)) if pixels[index]]
    if not images:
        return []
    fewest_tokens, fewest_pixels = min(lengths[i] for i in images), min(pixels[i] for i in images)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int, int]] = []  # sorted: free tokens, free pixels, row
    for document in sorted(images, key=lambda index: (-lengths[index], index)):
        first = bisect_left(open_rows, (lengths[document], pixels[document], 0))
        fitting = (at for at in range(first, len(open_rows)) if open_rows[at][1] >= pixels[document])
        if (at := next(fitting, None)) is not None:
            free_tokens, free_pixels, row = open_rows.pop(at)
        else:
            free_tokens = max_length
            free_pixels = max_pixels
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        left = (free_tokens - lengths[document], free_pixels - pixels[document], row)
        if left[0] >= fewest_tokens and left[1] >= fewest_pixels:
            insort(open_rows, left)
    return rows


def packed(rows: Dataset, max_tokens: int, pixels: Sequence[int] | None = None, max_pixels: int = 0) -> Dataset:
    """Pack rows of documents into rows of at most `max_tokens` tokens and `max_pixels` pixels; arguments as `pack`."""
    columns = {name: rows[name][:] for name in rows.column_names}
    together = pack([len(ids) for ids in columns["input_ids"]], max_tokens, pixels, max_pixels)
    joined = {
        name: [[item for index in indices for item in values[index]] for indices in together]
        for name, values in columns.items()
    }
    return Table.from_dict(joined, features=rows.features)
