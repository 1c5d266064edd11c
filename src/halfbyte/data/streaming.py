"""The rows of a run with `streaming: true`: read, tokenized and packed while it trains.

Rows come in blocks. A block has the next `shuffle_buffer_size` rows of the datasets, each dataset's share of them. It
is prepared like a small dataset (`data.prepare`, `data.prepare_answers`) and shuffled by the run's seed and its number.
So the order of rows depends on the data, the seed and the keys alone. A position in the stream is the number of a block
and the place up to which each dataset was read before it; a checkpoint stores it, and the resumed run reads that block
again and leaves out the rows that it has trained on.

Memory holds one block, and the first one, which the preflight checks, the memory plan and the data report describe.
Every rank reads all rows and trains on its own micro-batches, so steps do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from ..config.datasets import DatasetEntry
from ..config.schema import RunKeys
from ..reading import open_bytes
from ..utils.errors import ConfigError, DataError, HalfbyteError, TrainingError, first_line
from ..utils.streams import no_dataset_bars
from .mixture import shares_of, total_rows
from .prepare import NothingKeptError, Prepare, PreparedData
from .rows import Collate, Position, RankLoader, Row
from .sources import SAVED, Source, csv_rows, files_to_read, jsonl_rows, suffix_of, without_null

if TYPE_CHECKING:
    import datasets

LINES = {".jsonl": jsonl_rows, ".ndjson": jsonl_rows, ".csv": csv_rows, ".tsv": csv_rows}
LARGEST_COUNTED = 2**30  # bytes of a text file whose lines are counted before the run


@dataclass(frozen=True)
class _File:
    """A file, a saved folder or a Hub dataset that is read row by row.

    Attributes:
        name: the path, or the Hub id.
        file_format: as in `Source`.
        load: returns (line, row) pairs for kinds with lines, else a dataset of the library datasets.
        count: returns the number of rows, or an upper bound; None if it is not known.
    """

    name: str
    file_format: str
    load: Callable[[], Any]
    count: Callable[[], int | None]


class DatasetReader:
    """Reads the rows of one dataset in order, from any position.

    Attributes:
        ended: whether all of its rows were read at least once.

    Args:
        number: number of the dataset.
        split: split of entries without one.
    """

    def __init__(self, number: int, entry: DatasetEntry, split: str):
        self.number, self.entry = number, entry
        self.ended = False
        files = files_to_read(entry.path, entry.split or split)
        self.files = [_hub_file(entry.path, entry.split or split)] if files is None else [_file(path) for path in files]
        self.restart()

    def restart(self) -> None:
        """Go to the first row."""
        self._file = 0
        self._read = 0
        self._begin_file(row=0, state=None)

    def _begin_file(self, row: int, state: Position | None) -> None:
        """Go to a row of the file, which is not open yet.

        Args:
            state: of the library datasets, for files that it reads.
        """
        self._row, self._state = row, state
        self._rows: Iterator[Any] | None = None
        self._dataset: datasets.IterableDataset | None = None

    @property
    def position(self) -> Position:
        """The place of the next row; plain JSON values."""
        if self._dataset is not None:
            self._state = self._dataset.state_dict()
        return {"file": self._file, "read": self._read, "row": self._row, "state": self._state, "ended": self.ended}

    def seek(self, position: Position) -> None:
        """Go to a `position`."""
        self._file, self._read = position["file"], position["read"]
        self._begin_file(position["row"], position["state"])
        self.ended = position["ended"]

    def take(self, count: int) -> list[Source]:
        """Return the next `count` rows by file; fewer at the dataset's end.

        Raises:
            DataError: a file cannot be read, or a row is malformed.
        """
        if self.entry.max_samples is not None:
            count = min(count, self.entry.max_samples - self._read)
        sources = []
        while count > 0 and self._file < len(self.files):
            source = self._take(self.files[self._file], count)
            if source.rows:
                sources.append(source)
                count -= len(source.rows)
            if count > 0:
                self._file += 1
                self._begin_file(row=0, state=None)
        return sources

    def _take(self, file: _File, count: int) -> Source:
        first, lines = self._row, None
        try:
            if self._rows is None:
                self._open(file)
            assert self._rows is not None
            rows = list(islice(self._rows, count))
        except HalfbyteError:
            raise
        except Exception as error:  # from datasets, huggingface_hub, Arrow, or the files' contents
            reason = first_line(error)
            raise DataError(
                f"cannot read {file.name}: {reason}", "check the file or the Hub id, or remove it"
            ) from error
        self._read, self._row = self._read + len(rows), self._row + len(rows)
        if self._dataset is None:
            lines, rows = [line for line, _ in rows], [row for _, row in rows]
        else:
            rows = [without_null(row) for row in rows]
        return Source(file.name, file.file_format, rows, lines, dataset=self.number, first=first)

    def _open(self, file: _File) -> None:
        """Go to the next row of a file."""
        rows = file.load()
        if file.file_format in ("jsonl", "csv"):
            self._rows = islice(rows, self._row, None)
            return
        self._dataset = rows
        if self._state is not None:
            rows.load_state_dict(self._state)
        self._rows = iter(rows)

    def count(self) -> int | None:
        """Return the number of rows, or an upper bound; None if it is not known without reading them."""
        counts = [file.count() for file in self.files]
        if any(count is None for count in counts):
            return self.entry.max_samples
        total = sum(count for count in counts if count is not None)
        return total if self.entry.max_samples is None else min(total, self.entry.max_samples)


def _file(path: Path) -> _File:
    """Return a file that can be read row by row.

    Raises:
        DataError: its kind must be read in one piece.
    """
    suffix = suffix_of(path)
    if rows := LINES.get(suffix):
        file_format = "csv" if rows is csv_rows else "jsonl"
        return _File(str(path), file_format, partial(rows, path), partial(_count_lines, path))
    if suffix == ".parquet":
        import datasets
        from pyarrow import parquet

        load = partial(datasets.load_dataset, "parquet", data_files=[str(path)], split="train", streaming=True)
        return _File(str(path), "parquet", load, lambda: int(parquet.read_metadata(path).num_rows))
    if path.name == SAVED or suffix == ".arrow":
        saved = path.parent if path.name == SAVED else path
        return _File(
            str(saved), "arrow", lambda: _arrow_table(saved).to_iterable_dataset(), lambda: len(_arrow_table(saved))
        )
    fix = "write it as JSONL (one object per line) or Parquet, or remove streaming"
    raise DataError(f"{path}: streaming: true cannot read {suffix} files row by row", fix)


def _count_lines(path: Path) -> int | None:
    """Count the lines of a text file, which has at most as many rows; None for a large or compressed file."""
    if path.suffix.lower() not in LINES or path.stat().st_size > LARGEST_COUNTED:
        return None
    with open_bytes(path, DataError) as file:
        return 1 + sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(2**20), b""))


def _arrow_table(path: Path) -> Any:
    import datasets

    with no_dataset_bars():
        return (datasets.load_from_disk if path.is_dir() else datasets.Dataset.from_file)(str(path))  # memory-mapped


def _hub_file(name: str, split: str) -> _File:
    import datasets

    def load() -> Any:
        return datasets.load_dataset(name, split=split, streaming=True)

    def count() -> int | None:
        splits = load().info.splits or {}
        return splits[split].num_examples if split in splits else None

    return _File(name, "hub", load, count)


class RowStream:
    """The training rows of a run, in order.

    Args:
        prepare: prepares the rows of some sources.

    Attributes:
        first: the first block, prepared.
        needed: number of rows that the run trains on, set by `require`.
        check: called with the rows of each later block; may raise.
    """

    row_count = 0  # not known before the stream ends

    def __init__(self, config: RunKeys, prepare: Prepare):
        self.config, self.prepare = config, prepare
        self.readers = [
            DatasetReader(number, entry, config.dataset_split) for number, entry in enumerate(config.datasets)
        ]
        self.shares, self.size = shares_of(config), config.shuffle_buffer_size
        self.needed = 0
        self.check: Callable[[Any], None] = lambda rows: None
        self._starts: list[Position] = []
        self._resumed: Position | None = None
        sources, self._ended = self._next_sources(0)
        if not sources:
            paths = ", ".join(entry.path for entry in config.datasets)
            raise DataError(f"the dataset is empty: {paths} holds no rows", "put at least one row into it")
        self.first, self._after_first = prepare(sources), self._positions
        self._read = _rows_in(sources)
        self.first.report["train"]["streamed"] = True

    @property
    def _positions(self) -> list[Position]:
        """Where each dataset was read up to."""
        return [reader.position for reader in self.readers]

    def require(self, rows: int) -> None:
        """Set the number of rows that the run trains on; check that the stream has them, as far as that is known.

        Raises:
            ConfigError: it has fewer; the fix names the `max_steps` that it has rows for.
        """
        self.needed = rows
        if self._ended:
            self._check_total(len(self.first.train))
        counts = [reader.count() if share else 0 for reader, share in zip(self.readers, self.shares, strict=True)]
        row_counts = [count for count in counts if count is not None]
        if (
            len(row_counts) == len(counts) and len(self.first.train) <= self._read
        ):  # else a row of the data becomes several
            concatenated = self.config.mixing == "concat"
            total = sum(row_counts) if concatenated else total_rows(self.config, row_counts, self.shares) + self.size
            self._check_total(total, "at most ")

    def _check_total(self, rows: int, bound: str = "") -> None:
        """Check that the stream has enough rows.

        Args:
            bound: words before the number of rows.
        """
        if rows >= self.needed:
            return
        steps = rows // (self.needed // self.config.max_steps)
        problem = f"max_steps: {self.config.max_steps:,} steps need {self.needed:,} rows"
        remedy = "add data, or remove streaming to train several epochs"
        fix = f"set max_steps: {bound}{steps}, or {remedy}" if steps else remedy
        raise ConfigError(f"{problem}, and the stream has {bound}{rows:,}", fix)

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _next_sources(self, number: int) -> tuple[list[Source], bool]:
        """Return the rows of block `number`, and whether the stream ends with it."""
        if self.config.mixing == "concat":
            sources = []
            left = self.size
            for reader in self.readers:
                sources += reader.take(left)
                left = self.size - _rows_in(sources)
            return sources, left > 0
        sources = []
        for reader, share in zip(self.readers, self.shares, strict=True):
            count = math.floor(share * self.size * (number + 1)) - math.floor(share * self.size * number)
            block, complete = self._take(reader, count)
            sources += block
            if not complete:
                return sources, True
        return sources, False

    def _take(self, reader: DatasetReader, count: int) -> tuple[list[Source], bool]:
        """Return the next rows of a dataset, and whether they are complete.

        With `stopping: all` a shorter dataset starts again until all have ended.
        """
        sources = reader.take(count)
        while (missing := count - _rows_in(sources)) > 0:
            reader.ended = True
            drawn = (r for r, share in zip(self.readers, self.shares, strict=True) if share)
            if self.config.stopping == "first" or all(r.ended for r in drawn):
                return sources, False
            reader.restart()
            from_start = reader.take(missing)
            if not from_start:
                raise DataError(
                    f"the dataset is empty: {reader.entry.path} holds no rows", "put a row into it, or remove it"
                )
            sources += from_start
        return sources, True

    def _block(self, number: int) -> tuple[Any, bool]:
        """Return the prepared rows of the next block, which may be none, and whether the stream ends with it."""
        if number == 0:
            for reader, position in zip(self.readers, self._after_first, strict=True):
                reader.seek(position)
            return self.first.train, self._ended
        sources, ended = self._next_sources(number)
        try:
            rows = self.prepare(sources, later=True).train if sources else []
        except NothingKeptError:
            rows = []
        self.check(rows)
        return rows, ended

    # --- positions ---------------------------------------------------------------------------------------------------

    def resume(self, position: Position | None) -> None:
        """Start the next iteration at a `position` of this stream."""
        self._resumed = position

    def position(self, row: int) -> Position:
        """Return the start of the block with row number `row` (from 0), for a checkpoint."""
        while len(self._starts) > 1 and self._starts[1]["row"] <= row:
            self._starts.pop(0)
        return self._starts[0]

    def load(
        self, size: int, collate: Collate, *, seed: int | None, skip: int, rank: int, ranks: int, pinned: bool
    ) -> RankLoader:
        """Return the micro-batches of one rank, see `rows.TrainingRows.load`; the order depends on the run's seed."""
        total = self.needed // size - skip

        def micro_batches() -> Iterator[list[Row]]:
            rows = self.rows(skip * size)
            for number in range(total):
                micro_batch = list(islice(rows, size))
                if number % ranks == rank:
                    yield micro_batch

        loaded = _MicroBatches(micro_batches)
        loader: DataLoader = DataLoader(loaded, batch_size=None, collate_fn=collate, pin_memory=pinned)
        return RankLoader(loader, total // ranks, total)

    def rows(self, first: int) -> Iterator[Row]:
        """Yield the rows of the run from row number `first` on.

        Raises:
            TrainingError: the stream ends too early, or a later row cannot be read or prepared.
        """
        start = self._resumed or {"block": 0, "row": 0, "datasets": None}
        number, row = start["block"], start["row"]
        self._starts = []
        for reader, position in zip(self.readers, start["datasets"] or (), strict=False):
            reader.seek(position)
        ended = False
        while not ended:
            self._starts.append({"block": number, "row": row, "datasets": self._positions if number else None})
            try:
                rows, ended = self._block(number)
                if ended:
                    self._check_total(row + len(rows))
            except HalfbyteError as error:
                raise TrainingError(error.message, error.fix) from error
            order = np.arange(len(rows))
            if self.size > 1:
                order = np.random.default_rng([self.config.seed, number]).permutation(order)
            for index in order[max(first - row, 0) :].tolist():
                yield rows[index]
            number, row = number + 1, row + len(rows)


class _MicroBatches(IterableDataset):
    """Lists of rows, from a function that returns an iterator of them."""

    def __init__(self, iterator: Callable[[], Iterator[list[Row]]]):
        self.iterator = iterator

    def __iter__(self) -> Iterator[list[Row]]:
        return self.iterator()


def prepared(config: RunKeys, prepare: Prepare) -> PreparedData:
    """Return a run's data; with `streaming: true` its first block, with the stream."""
    if not config.streaming:
        return prepare()
    stream = RowStream(config, prepare)
    return replace(stream.first, stream=stream)


def _rows_in(sources: list[Source]) -> int:
    return sum(len(source.rows) for source in sources)
