"""Numbers of metrics.jsonl by column. A running file is read from the last offset; a replaced one from its start."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runs.layout import EVAL, TRAIN

LONGEST_LINE = 1 << 20  # bytes; longer lines are no records
CHUNK = 1 << 18  # bytes of lines that are parsed at once
LARGEST = 1 << 28  # bytes of a metrics.jsonl that are read, from its end
PROBES = 48  # records that a glance reads
SMALL = 1 << 16  # bytes at the end of a file that a glance reads in full


class Series:
    """Records of one kind, by step. `columns` has the numbers of each key; a missing number is NaN."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.columns: dict[str, array[float]] = {}
        self._keys: tuple[str, ...] = ()  # of the last record
        self._filled: list[tuple[str, array[float]]] = []  # its columns, if all are as long as `steps`

    def append(self, record: dict[str, Any]) -> None:
        """Add a record. A step that repeats, as after a resume, replaces the records from there on."""
        step = int(record["step"])
        if self.steps and step <= self.steps[-1]:
            first = bisect_left(self.steps, step)
            del self.steps[first:]
            for column in self.columns.values():
                del column[first:]
        count = len(self.steps)
        self.steps.append(step)
        if self._keys == (keys := tuple(record)):
            try:
                for key, column in self._filled:
                    column.append(record[key])
                return
            except (TypeError, OverflowError):
                for _, column in self._filled:
                    del column[count:]
        self._keys, self._filled = keys, []
        for key, value in record.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step":
                column = self.columns.setdefault(key, array("d"))
                column.extend([math.nan] * (count - len(column)))
                column.append(_as_float(value))
                self._filled.append((key, column))

    def copy(self) -> Series:
        """Return a copy, which another thread does not change."""
        series = Series()
        series.steps = self.steps[:]
        series.columns = {key: column[:] for key, column in self.columns.items()}
        return series

    def column(self, key: str) -> list[float]:
        """Return the numbers of a key, one per step."""
        values = self.columns.get(key, array("d"))
        return [*values, *[math.nan] * (len(self.steps) - len(values))]

    def last(self, key: str) -> float | None:
        """Return the last finite number of a key."""
        values = self.columns.get(key, ())
        return next((value for value in reversed(values) if math.isfinite(value)), None)

    def first(self, key: str) -> float | None:
        """Return the first finite number of a key."""
        return next((value for value in self.columns.get(key, ()) if math.isfinite(value)), None)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


@dataclass
class Records:
    """The records of a run.

    Attributes:
        unreadable: number of lines that are no records.
        skipped: whether the beginning of a huge file is left out.
    """

    train: Series = field(default_factory=Series)
    evals: Series = field(default_factory=Series)
    unreadable: int = 0
    skipped: bool = False


class MetricsFile:
    """Reads the records of a metrics.jsonl, from its start once, then where it has grown."""

    def __init__(self, path: Path):
        self.path, self.lock = path, threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self.records = Records()
        self._offset, self._file = 0, (0, 0)

    def read(self) -> Records:
        """Return a copy of all records so far. An incomplete last line is left for the next call."""
        with self.lock:
            self._refresh()
            now = self.records
            return Records(now.train.copy(), now.evals.copy(), now.unreadable, now.skipped)

    def _refresh(self) -> None:
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                identity = (stat.st_dev, stat.st_ino)
                if identity != self._file or stat.st_size < self._offset:
                    self._restart()
                    self._file = identity
                if stat.st_size - self._offset > LARGEST:
                    self._offset, self.records.skipped = stat.st_size - LARGEST, True
                    file.seek(self._offset)
                    self._offset += len(file.readline())
                file.seek(self._offset)
                while lines := file.readlines(CHUNK):
                    incomplete = lines.pop() if not lines[-1].endswith(b"\n") else b""
                    self._offset += sum(map(len, lines))
                    self._add(lines)
                    if incomplete:
                        break
        except OSError:
            self._restart()

    def _add(self, lines: list[bytes]) -> None:
        """Add the records of complete lines. They are parsed at once, which takes half the time, if all are JSON."""
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")
            if len(records) != len(lines):
                raise ValueError
        except (ValueError, RecursionError):
            if len(lines) > 1:
                for line in lines:
                    self._add([line])
            else:
                self.records.unreadable += bool(lines and lines[0].strip())
            return
        for record in records:
            try:
                kind = record["kind"]
                if kind in (TRAIN, EVAL):
                    (self.records.train if kind == TRAIN else self.records.evals).append(record)
            except (ValueError, KeyError, TypeError, OverflowError):
                self.records.unreadable += 1


def glance(path: Path) -> tuple[Series, Series]:
    """Return a few training records over the whole file, and the last evaluations, without reading all of it."""
    train, evals = Series(), Series()
    lines: list[bytes] = []
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for probe in range(PROBES) if size > SMALL else ():
                file.seek(max(probe * size // PROBES - 1, 0))
                if probe:
                    file.readline(LONGEST_LINE)  # the rest of a line
                lines.append(file.readline(LONGEST_LINE))
            file.seek(max(size - SMALL, 0))
            tail = file.read(SMALL).splitlines(keepends=True)
    except OSError:
        return train, evals
    lines = lines or tail[:: max(1, len(tail) // PROBES)]
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for line in (*lines, *tail[-2:], *(line for line in tail if b'"eval"' in line[:40])):
        try:
            record = json.loads(line)
            if record["kind"] in (TRAIN, EVAL):
                records[record["kind"], int(record["step"])] = record
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            continue
    for (kind, _), record in sorted(records.items(), key=lambda item: item[0][1]):
        (train if kind == TRAIN else evals).append(record)
    return train, evals
