"""Tables of rows that were made here.

datasets keeps what it made under a hash of what it was made of, which it takes by pickling all of that, the rows and
the modules of the libraries, too: of a library that lies outside of Python's own folders that fails. Nothing made here
is kept, so each table gets a name of its own instead.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import pyarrow as pa
from datasets import Dataset

HASHED_AT_ONCE = 4096  # rows


def new_name() -> str:
    """What to give as `new_fingerprint` where rows get further columns."""
    return uuid.uuid4().hex


def digest_of_rows(rows: Dataset) -> str:
    """Return the SHA-256 of all columns of a table, their names and types included, whatever its chunks are."""
    digest = hashlib.sha256()
    plain = rows.with_format("arrow")
    for first in range(0, len(rows), HASHED_AT_ONCE):
        table = plain[first : first + HASHED_AT_ONCE].combine_chunks().replace_schema_metadata(None)
        table = table.select(sorted(table.column_names))
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema) as stream:
            stream.write_table(table)
        digest.update(buffer.getvalue())
    return digest.hexdigest()


class Table(Dataset):
    """A `Dataset` whose contents are not hashed when it is made, as by `Table.from_dict`."""

    def __init__(
        self, arrow_table: Any, info: Any = None, split: Any = None, indices_table: Any = None,
        fingerprint: str | None = None,
    ):  # fmt: skip
        super().__init__(arrow_table, info, split, indices_table, fingerprint or new_name())
