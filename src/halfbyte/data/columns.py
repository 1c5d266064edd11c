"""Columns of the data that are not text: arrays that rows bring along, from their files to a batch.

`batch.COLUMNS` declares them. A prepared row stores the array of each of its documents as bytes, so that rows are
selected, packed and hashed without a conversion of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Value

from ..batch import COLUMNS, Column, pad_entries
from ..reading import parse_json
from ..utils.errors import DataError
from .formats import described
from .sources import Source

ARRAYS = datasets.List(Value("binary"))  # one array per document


def columns_of(sources: Iterable[Source]) -> list[Column]:
    """Return the declared columns that a row of `sources` has."""
    declared = [column for column in COLUMNS.values() if column.in_data]
    if not declared:
        return []
    present = {name for source in sources for row in source.rows for name in row}
    return [column for column in declared if column.name in present]


def array_bytes(row: Mapping[str, Any], column: Column, location: str) -> bytes:
    """Return the entries of a row, [*shape] or for a ragged column [n, *shape].

    Args:
        location: the row's file and line, for errors.

    Raises:
        DataError: the row has no array of the column's shape and dtype.
    """
    value = row.get(column.name)
    if value is None and column.ragged:
        value = []
    if isinstance(value, str):  # of a CSV file
        value = parse_json(value, f"{location}, column {column.name!r}", DataError, "write the array as JSON")
    try:
        numbers = np.asarray(value)
        array = numbers.astype(column.dtype)
    except (TypeError, ValueError, OverflowError):  # lists of unequal lengths, texts, nothing
        raise _misfit(value, column, location) from None
    is_exact = array.dtype.kind == "f" or np.array_equal(array, numbers)
    entry_shape = array.shape[1:] if column.ragged else array.shape
    has_shape = entry_shape == column.shape and array.ndim == len(column.shape) + column.ragged
    is_empty = column.ragged and array.shape == (0,)
    if not (numbers.dtype.kind in "biuf" and is_exact and np.isfinite(array).all() and (has_shape or is_empty)):
        raise _misfit(value, column, location)
    return array.tobytes()


def _misfit(value: Any, column: Column, location: str) -> DataError:
    shape = ["n", *column.shape] if column.ragged else [*column.shape]
    expected = f"an array of {column.dtype} [{', '.join(map(str, shape))}]"
    return DataError(
        f"{location}: column {column.name!r} holds {described(value)}, not {expected}", f"give {expected} in every row"
    )


def collate_columns(rows: Sequence[Mapping[str, Any]], rounded: bool) -> dict[str, torch.Tensor]:
    """Return the arrays of rows as tensors [entries, *shape], in the order of the rows' documents.

    Args:
        rounded: pad to few numbers of entries, since each shape costs a CUDA graph.
    """
    columns = {}
    for column in COLUMNS.values():
        if column.in_data and column.name in rows[0]:
            stored = bytearray(b"".join(array for row in rows for array in row[column.name]))
            entries = np.frombuffer(stored, dtype=column.dtype).reshape(-1, *column.shape)
            count = len(entries)
            if rounded and count:  # to four counts per octave; up to 8 entries are exact
                step = 1 << max((count - 1).bit_length() - 3, 0)
                count = -(-count // step) * step
            columns[column.name] = pad_entries(torch.from_numpy(entries), count, column.fill)
    return columns
