"""Tables of rows that were made here.

datasets keeps what it made under a hash of what it was made of, which it takes by pickling all of that, the rows and
the modules of the libraries, too: of a library that lies outside of Python's own folders that fails. Nothing made here
is kept, so each table gets a name of its own instead.
"""

from __future__ import annotations

import uuid
from typing import Any

from datasets import Dataset


def new_name() -> str:
    """What to give as `new_fingerprint` where rows get further columns."""
    return uuid.uuid4().hex


class Table(Dataset):
    """A `Dataset` whose contents are not hashed when it is made, as by `Table.from_dict`."""

    def __init__(
        self, arrow_table: Any, info: Any = None, split: Any = None, indices_table: Any = None,
        fingerprint: str | None = None,
    ):  # fmt: skip
        super().__init__(arrow_table, info, split, indices_table, fingerprint or new_name())
