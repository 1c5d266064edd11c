"""Finds the runs in folders, and reads summaries, notes and files of each. Any file may be missing or damaged.

The content of a file is cached until its time or size changes. halfbyte replaces the small files of a run and so
changes the time of its folder. A run that has ended thus costs one stat per look; all its files are looked at every
`RECHECK_SECONDS`, for those that an editor changes in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..reading import read_json, read_text
from ..runs import layout
from ..runs.queue import DATABASE, LOGS, Job, Queue, queue_folder
from ..runs.status import ENDED, RUNNING, RunStatus, names_in, read_status, run_folders
from ..utils.errors import ConfigError, HalfbyteError
from ..utils.files import write_json
from .series import MetricsFile, Records, Series, glance

SHARED_SECONDS = 0.25  # during which pages share one look at the folders
RECHECK_SECONDS = 30.0
SETTLED = 2.0  # seconds after which a change has certainly changed the time of a folder
OPEN_RUNS = 12  # runs whose records are cached: the largest comparison
NOTE_BYTES = 20_000
LOG_BYTES = 20_000  # of the end of a log that a page shows
DECIDING = (layout.STATUS, layout.RESOLVED_CONFIG)  # files by which `run_folders` knows a run
LARGEST_JSON = 1 << 26  # bytes of a file of a run that a page reads
HEADINGS = ("model_name_or_path", "method", "dataset", "r", "learning_rate")  # keys that a list shows
_KEY = re.compile(rf"^({'|'.join(HEADINGS)}):.*$", re.MULTILINE)
Value = TypeVar("Value")


@dataclass
class Notes:
    """Notes of users on a run: its notes.json.

    Attributes:
        hidden: whether lists leave the run out.
    """

    text: str = ""
    tags: list[str] = field(default_factory=list)
    hidden: bool = False


@dataclass
class Summary:
    """A run in a list.

    Attributes:
        id: in URLs; a hash of the folder.
        name: the folder below its root.
        status: None if status.json cannot be read.
        keys: `HEADINGS` of its configuration.
        train, evals: some of its records.
        error: why it failed or cannot be read.
        version: a text that changes when a list of runs changes.
    """

    id: str
    folder: Path
    root: Path
    name: str
    status: RunStatus | None
    keys: dict[str, Any]
    train: Series
    evals: Series
    notes: Notes
    error: str = ""
    version: str = ""

    @property
    def state(self) -> str:
        return self.status.state if self.status else "unreadable"

    @property
    def is_running(self) -> bool:
        return self.state in RUNNING

    @property
    def seconds(self) -> float | None:
        """Seconds between the first and the last record."""
        first, last = self.train.first("time"), self.train.last("time")
        return None if first is None or last is None else max(last - first, 0.0)


class Cache:
    """Values made from files, until one of these changes; the `limit` that were used last."""

    def __init__(self, limit: int):
        self.limit, self.lock = limit, threading.Lock()
        self.values: OrderedDict[Any, tuple[Any, Any]] = OrderedDict()

    def get(self, key: Any, version: Any, make: Callable[[], Value]) -> Value:
        """Return the value of `key` if it was made from this `version`, else make it."""
        with self.lock:
            if key in self.values and self.values[key][0] == version:
                self.values.move_to_end(key)
                return self.values[key][1]
        value = make()
        with self.lock:
            self.values[key] = (version, value)
            self.values.move_to_end(key)
            while len(self.values) > self.limit:
                self.values.popitem(last=False)
        return value


class Runs:
    """The runs below some folders."""

    def __init__(self, roots: Sequence[Path]):
        self.roots = [Path(root).absolute() for root in roots]
        self._glances = Cache(2000)
        self._small = Cache(6000)
        self._jobs = Cache(1)
        self._ended = Cache(2000)
        self._metrics: OrderedDict[Path, MetricsFile] = OrderedDict()
        self._lock = threading.Lock()
        self._ids: dict[Path, str] = {}
        self._listings: dict[Path, tuple[int, dict[str, bool]]] = {}
        self._summaries: dict[str, tuple[int, float, Summary]] = {}  # of ended runs: time of the folder, until when
        self._folders: dict[str, tuple[Path, Path]] = {}
        self._all: list[Summary] = []
        self._searched = self._listed = -math.inf

    def folders(self) -> dict[str, tuple[Path, Path]]:
        """Return root and folder of each run by its id."""
        with self._lock:
            if time.monotonic() - self._searched > SHARED_SECONDS:
                seen: dict[Path, Path] = {}
                listings: dict[Path, tuple[int, dict[str, bool]]] = {}
                for root in self.roots:
                    for folder in run_folders(root, listing=lambda folder: self._names_in(folder, listings)):
                        seen.setdefault(folder, root)
                self._listings = listings
                self._ids = {folder: self._ids.get(folder) or run_id(folder) for folder in seen}
                self._folders = {number: (seen[folder], folder) for folder, number in self._ids.items()}
                self._searched = time.monotonic()
            return self._folders

    def _names_in(self, folder: Path, listings: dict[Path, tuple[int, dict[str, bool]]]) -> dict[str, bool]:
        """Return what `run_folders` needs of `names_in`, read again only if the time of the folder has changed.

        Args:
            listings: is given the time and the names; a time of -1 if the folder has just been changed.
        """
        changed = os.stat(folder).st_mtime_ns
        cached = self._listings.get(folder)
        if cached is not None and cached[0] == changed:
            listings[folder] = cached
            return cached[1]
        is_settled = time.time_ns() - changed >= SETTLED * 1e9
        names = {name: is_folder for name, is_folder in names_in(folder).items() if is_folder or name in DECIDING}
        listings[folder] = (changed if is_settled else -1, names)
        return names

    def forget(self) -> None:
        """Look at all files again at the next call."""
        self._summaries.clear()
        self._searched = self._listed = -math.inf

    def all(self) -> list[Summary]:
        """Return a summary of every run, running ones first, then by their last heartbeat."""
        folders, searched = self.folders(), self._searched
        if self._listed != searched:
            summaries = [self._summary(number, *pair) for number, pair in folders.items()]
            self._all = sorted(
                summaries, key=lambda run: (not run.is_running, -(run.status.heartbeat if run.status else 0))
            )
            self._listed = searched
        return self._all

    def summary(self, number: str) -> Summary:
        """Return the summary of a run.

        Raises:
            KeyError: no run has this id.
        """
        return self._summary(number, *self.folders()[number])

    def _summary(self, number: str, root: Path, folder: Path) -> Summary:
        """Return the summary of a run; of one that has ended, the cached one until its folder changes."""
        changed, _ = self._listings.get(folder, (-1, {}))
        if number in self._summaries and changed != -1:
            known, until, summary = self._summaries[number]
            if known == changed and time.monotonic() < until:
                return summary
        summary = self._summarize(number, root, folder)
        if changed != -1 and not summary.is_running:
            spread = RECHECK_SECONDS * (0.5 + int(number[:4], 16) / 2**17)  # so that runs are not due at once
            self._summaries[number] = (changed, time.monotonic() + spread, summary)
        return summary

    def _summarize(self, number: str, root: Path, folder: Path) -> Summary:
        """Return the summary of a run from its files."""
        error = ""
        try:
            status = self._status(folder)
        except ConfigError as unreadable:
            status, error = None, unreadable.message
        metrics = folder / layout.METRICS
        recorded = version_of(metrics)
        train, evals = self._glances.get(metrics, recorded, lambda: glance(metrics))
        config = folder / layout.RESOLVED_CONFIG
        name = str(folder.relative_to(root))
        notes = self.notes(folder)
        described = (status.state, status.step, status.total_steps, status.error) if status else error
        return Summary(
            id=number,
            folder=folder,
            root=root,
            name=root.name if name == "." else name,
            status=status,
            keys=self._small.get(config, version_of(config), lambda: _headings(config)),
            train=train,
            evals=evals,
            notes=notes,
            error=status.error if status else error,
            version=f"{number} {described} {recorded} {notes}",
        )

    def _status(self, folder: Path) -> RunStatus | None:
        """Return the status of a run, cached if it has ended. Before its end the status also depends on its process."""
        path = folder / layout.STATUS
        version = version_of(path)
        status = self._ended.get(path, version, lambda: read_status(folder))
        return status if status is None or status.state in ENDED else read_status(folder)

    def metrics(self, folder: Path) -> Records:
        """Return all records of a run so far."""
        with self._lock:
            file = self._metrics.pop(folder, None) or MetricsFile(folder / layout.METRICS)
            self._metrics[folder] = file
            while len(self._metrics) > OPEN_RUNS:
                self._metrics.popitem(last=False)
        return file.read()

    def notes(self, folder: Path) -> Notes:
        """Return the notes of a run; empty ones if the file is missing or damaged."""
        path = folder / layout.NOTES
        return self._small.get(path, version_of(path), lambda: _notes(path))

    def document(self, folder: Path, name: str, expected: type[Value]) -> Value | None:
        """Return a JSON file of a run; None if it is missing, damaged, huge or of another type."""
        path = folder / name
        value = self._small.get(path, version_of(path), lambda: _json(path))
        return value if isinstance(value, expected) else None

    def lines(self, folder: Path, name: str) -> list[dict[str, Any]]:
        """Return the objects of a JSON lines file of a run; lines that are none are left out."""
        path = folder / name
        return self._small.get(path, version_of(path), lambda: _lines(path))

    def log_path(self, output: Path) -> Path | None:
        """Return the file with the output of a run that the queue or the board has started; None for others."""
        paths = [queue_folder() / LOGS / f"job-{job.id}.log" for job in self.jobs() if job.output == str(output)]
        return next((path for path in reversed(paths) if path.exists()), None)

    def log_of(self, output: Path) -> str:
        """Return the end of the output of a run that the queue or the board has started; empty for others."""
        path = self.log_path(output)
        with contextlib.suppress(OSError):
            if path is not None:
                with open(path, "rb") as file:
                    file.seek(max(os.fstat(file.fileno()).st_size - LOG_BYTES, 0))
                    return file.read().decode(errors="replace")
        return ""

    def jobs(self) -> list[Job]:
        """Return the jobs of the queue; none if there is no queue, or it cannot be read."""
        database = queue_folder() / DATABASE
        versions = (version_of(database), version_of(database.with_name(f"{DATABASE}-wal")))
        if versions[0] is None:
            return []
        try:
            return self._jobs.get("jobs", versions, Queue(queue_folder()).jobs)
        except HalfbyteError:
            return []

    def version(self, folder: Path) -> str:
        """Return a text that changes when a page of this run changes."""
        names = (layout.METRICS, layout.NOTES, layout.SAMPLES, layout.CHECKS, layout.ENVIRONMENT, layout.ROW_LOSSES)
        try:
            status = self._status(folder)
            state = "" if status is None else f"{status.state} {status.step}"
        except ConfigError:
            state = "unreadable"
        log = self.log_path(folder)
        return f"{state} {[version_of(folder / name) for name in names]} {log and version_of(log)}"


def run_id(folder: Path) -> str:
    """Return the id of a run in URLs."""
    return hashlib.sha256(str(folder).encode(errors="surrogateescape")).hexdigest()[:12]


def version_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file changes; None if there is none."""
    try:
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
    except (OSError, ValueError):
        return None


def save_notes(folder: Path, notes: Notes) -> None:
    """Write the notes of a run, atomically.

    Raises:
        ConfigError: they are too long.
        HalfbyteError: the file cannot be written.
    """
    if len(notes.text) + sum(map(len, notes.tags)) > NOTE_BYTES:
        raise ConfigError(f"notes: they are longer than {NOTE_BYTES:,} characters", "shorten them")
    write_json(folder / layout.NOTES, vars(notes))


def _notes(path: Path) -> Notes:
    document = _json(path)
    if not isinstance(document, dict):
        return Notes()
    tags = document.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return Notes(str(document.get("text") or ""), tags, document.get("hidden") is True)


def _json(path: Path) -> Any:
    try:
        return read_json(path, ConfigError, "", LARGEST_JSON)
    except (HalfbyteError, OSError, ValueError):
        return None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = read_text(path, ConfigError, "", LARGEST_JSON)
    except (HalfbyteError, OSError, ValueError):
        return []
    objects = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def _headings(path: Path) -> dict[str, Any]:
    """Return some keys of a configuration without reading all of it as YAML, which takes 20 times as long."""
    try:
        text = read_text(path, ConfigError, "", LARGEST_JSON)
    except (HalfbyteError, OSError, ValueError):
        return {}
    keys: dict[str, Any] = {}
    for match in _KEY.finditer(text):
        try:
            value = yaml.safe_load(match[0])
        except (yaml.YAMLError, ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            keys |= value
    return keys
