"""The queue of runs: jobs in an SQLite file, and the runner that starts them. Imports no torch.

A runner is one process, detached from its terminal, which holds a lock. Each job is a process in a session of its own,
which outlives the runner. Nothing is lost and nothing runs twice, whenever a process is killed:

- The runner marks a job as starting, with a new number of the attempt, before it starts a process for it.
- That process marks the job as running, with its own identity, only while the attempt is still this one. Then it
  replaces itself by the run (`exec`), which keeps PID and start time.
- A new runner puts jobs that are starting back into the queue. A process that starts late finds another attempt, and
  ends. Running jobs are recognised by their processes.
- How a job ended is read from the run's status.json.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import ConfigError, explain_os_error
from ..utils.processes import Process
from .status import ENDED, read_status

DATABASE = "queue.sqlite"
LOCK = "runner.lock"
LOGS = "logs"
TIMEOUT = 30.0  # seconds that a transaction waits for another one
QUEUED = "queued"
STARTING = "starting"
RUNNING = "running"
HELD = "held"
FAILED = "failed"
ACTIVE = (STARTING, RUNNING)
CPU = "cpu"
SETTLED_STEP = 2  # steps after which a run has allocated what it needs

_TABLE = """
CREATE TABLE IF NOT EXISTS jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT, position REAL NOT NULL, command TEXT NOT NULL, folder TEXT NOT NULL,
    output TEXT NOT NULL, keys TEXT NOT NULL, file TEXT NOT NULL, digest TEXT NOT NULL, planned INTEGER NOT NULL,
    on_gpu INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'queued', attempt INTEGER NOT NULL DEFAULT 0,
    process TEXT, lane TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT ''
)
"""


def queue_folder() -> Path:
    """Return the folder of the queue: $HALFBYTE_QUEUE, or in the user's folder for state.

    Raises:
        ConfigError: the user has no home folder.
    """
    try:
        if chosen := os.environ.get("HALFBYTE_QUEUE"):
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "halfbyte" / "queue"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder", "set HALFBYTE_QUEUE to a folder for the queue") from error


@dataclass(frozen=True)
class Job:
    """A run in the queue.

    Attributes:
        command: arguments of this Python.
        folder: current folder of the command.
        output: the run's folder, absolute.
        keys: the keys in which it differs from its file, for lists.
        file, digest: its configuration file, absolute, and the file's hash when it was queued; empty without a file.
        planned: bytes that the run needs on its device.
        on_gpu: whether the device is a GPU.
        attempt: number of times that a process was started for it.
        process: of the run; None before it runs.
        lane: the GPU that it was started on, or "cpu".
        error: why it failed, or is held.
    """

    id: int
    position: float
    command: list[str]
    folder: str
    output: str
    keys: str
    file: str
    digest: str
    planned: int
    on_gpu: bool
    state: str
    attempt: int
    process: Process | None
    lane: str
    error: str


def digest_of(file: str) -> str:
    """Return the hash of a configuration file; empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


class Queue:
    """The jobs in the SQLite file of a folder. Each call is one transaction."""

    def __init__(self, folder: Path):
        self.folder = folder

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file, and commit or undo what is done within the context.

        Raises:
            ConfigError: the file cannot be read or written, or is not a queue.
        """
        path = self.folder / DATABASE
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=TIMEOUT, isolation_level=None)
            with contextlib.closing(connection):
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_TABLE)
                try:
                    yield connection
                except BaseException:
                    connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
        except OSError as error:
            raise ConfigError(f"{path}: {explain_os_error(error)}", "set HALFBYTE_QUEUE to another folder") from error
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be used: {error}", "move it away, or set HALFBYTE_QUEUE") from error

    def jobs(self, *states: str) -> list[Job]:
        """Return the jobs in these states (default: all), in the order of the queue."""
        with self._transaction() as connection:
            rows = connection.execute(f"SELECT {', '.join(Job.__annotations__)} FROM jobs ORDER BY position, id")
            jobs = [_job(dict(zip(Job.__annotations__, row, strict=True))) for row in rows]
        return [job for job in jobs if not states or job.state in states]

    def add(self, entries: Sequence[Mapping[str, Any]]) -> list[int]:
        """Append jobs, all or none; returns their numbers.

        Args:
            entries: `command`, `folder`, `output`, `keys`, `file`, `planned` and `on_gpu` of each.

        Raises:
            ConfigError: another job that has not ended writes into the same folder.
        """
        numbers = []
        with self._transaction() as connection:
            for entry in entries:
                states = (QUEUED, HELD, *ACTIVE)
                marks = ", ".join("?" * len(states))
                same = f"SELECT id FROM jobs WHERE output = ? AND state IN ({marks})"
                if (other := connection.execute(same, (entry["output"], *states)).fetchone()) is not None:
                    wrong = f"output_dir: job {other[0]} writes into {entry['output']}"
                    raise ConfigError(wrong, f"choose another output_dir, or halfbyte queue remove {other[0]}")
                values = {**entry, "command": json.dumps(entry["command"]), "digest": digest_of(entry["file"])}
                columns = ", ".join(values)
                last = "(SELECT COALESCE(MAX(position), 0) + 1 FROM jobs)"
                text = f"INSERT INTO jobs (position, {columns}) VALUES ({last}, {', '.join('?' * len(values))})"
                numbers.append(int(connection.execute(text, tuple(values.values())).lastrowid or 0))
        return numbers

    def change(self, job: Job, **columns: Any) -> bool:
        """Change columns of a job; returns False if its state or attempt has changed since it was read."""
        with self._transaction() as connection:
            text = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in columns)}"
            condition = " WHERE id = ? AND state = ? AND attempt = ?"
            values = (*columns.values(), job.id, job.state, job.attempt)
            return connection.execute(text + condition, values).rowcount == 1

    def move(self, number: int, place: int) -> None:
        """Move a waiting job to a place among the waiting jobs, from 1.

        Raises:
            ConfigError: it is not waiting.
        """
        waiting = self.jobs(QUEUED, HELD)
        job = self._one(number, waiting, "moved")
        positions = [queued.position for queued in waiting if queued.id != number]
        index = min(max(place - 1, 0), len(positions))
        low = positions[index - 1] if index else (positions[0] - 2 if positions else job.position - 1)
        high = positions[index] if index < len(positions) else low + 2
        self.change(job, position=(low + high) / 2)

    def remove(self, number: int) -> None:
        """Remove a job that does not run; the folder of its run stays.

        Raises:
            ConfigError: it runs, or there is none.
        """
        job = self._one(number, [job for job in self.jobs() if job.state not in ACTIVE], "removed")
        with self._transaction() as connection:
            marks = (number, job.state, job.attempt)
            gone = connection.execute("DELETE FROM jobs WHERE id = ? AND state = ? AND attempt = ?", marks).rowcount
        if not gone:
            raise ConfigError(f"job {number} has just been started", f"halfbyte stop {job.output}")

    def _one(self, number: int, jobs: Sequence[Job], action: str) -> Job:
        if (job := next((job for job in jobs if job.id == number), None)) is not None:
            return job
        existing = next((job for job in self.jobs() if job.id == number), None)
        if existing is None:
            raise ConfigError(f"there is no job {number}", "see `halfbyte queue list`")
        fix = f"halfbyte stop {existing.output}" if existing.state in ACTIVE else "add it again"
        raise ConfigError(f"job {number} is {existing.state}, and cannot be {action}", fix)


def _job(row: dict[str, Any]) -> Job:
    process = None if row["process"] is None else Process(*json.loads(row["process"]))
    row |= {"command": json.loads(row["command"]), "on_gpu": bool(row["on_gpu"]), "process": process}
    return Job(**row)


# --- the process of a job --------------------------------------------------------------------------------------------


def run_job(folder: Path, number: int, attempt: int) -> None:
    """Mark a job as running and replace this process by its run; end if the job has another attempt by now."""
    queue = Queue(folder)
    job = next((job for job in queue.jobs(STARTING) if (job.id, job.attempt) == (number, attempt)), None)
    if job is not None and queue.change(job, state=RUNNING, process=json.dumps(Process.current())):
        os.chdir(job.folder)
        os.execv(sys.executable, [sys.executable, *job.command])


# --- the runner ------------------------------------------------------------------------------------------------------


class Runner:
    """Starts the jobs of a queue in their order, each on a device where its planned memory is free.

    A later job does not overtake one that has to wait, so that large jobs run, too. A device gets its next job when the
    runs on it have made `SETTLED_STEP` steps: then its free memory is what they leave.

    Args:
        queue: of the jobs.
        free: returns the free bytes of each lane: the index of a GPU, or "cpu".
    """

    def __init__(self, queue: Queue, free: Callable[[], Mapping[str, int]]):
        self.queue, self.free = queue, free
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by the number of the job

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the runner, and put jobs that an ended runner was starting back into the queue.

        Raises:
            ConfigError: another runner holds it.
        """
        self.queue.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.queue.folder / LOCK, "a+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                wrong = f"process {file.read(20) or '?'} is the runner of {self.queue.folder}"
                raise ConfigError(wrong, "it starts all jobs of the queue; see `halfbyte queue list`") from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            for job in self.queue.jobs(STARTING):
                self.queue.change(job, state=QUEUED, attempt=job.attempt + 1)
            yield

    def advance(self) -> bool:
        """Record the ends of jobs and start those that fit; returns whether jobs are left."""
        for job in self.queue.jobs(*ACTIVE):
            self._settle(job)
        while (first := next(iter(self.queue.jobs(QUEUED)), None)) is not None and self._start_or_hold(first):
            pass
        return bool(self.queue.jobs(QUEUED, *ACTIVE))

    def _settle(self, job: Job) -> None:
        """Record the end of a job whose process has ended."""
        if job.process is not None and job.process.is_running:
            return
        child = self._children.get(job.id)  # unless an earlier runner started it
        code = None if child is None else child.poll()
        if job.state == STARTING:
            if code is not None:
                error = f"it could not be started (exit code {code}); {self._log(job)}"
                self.queue.change(job, state=FAILED, error=error)
            return
        state, error = FAILED, f"it ended without a result{'' if code is None else f' (exit code {code})'}"
        with contextlib.suppress(ConfigError):
            status = read_status(Path(job.output))
            if status is not None and status.process == job.process and status.state in ENDED:
                state, error = status.state, status.error
        log = f"; {self._log(job)}" if state == FAILED else ""
        self.queue.change(job, state=state, error=f"{error}{log}")
        self._children.pop(job.id, None)

    def _start_or_hold(self, job: Job) -> bool:
        """Start a job if a device has room for it; returns whether it left the queue.

        A job is held if its file has changed, or if it needs a GPU and the runner has none.
        """
        free = {lane: count for lane, count in self.free().items() if (lane != CPU) == job.on_gpu}
        error = "" if free else "it needs a GPU, and the runner has none; start the runner with --gpus"
        if job.file and digest_of(job.file) != job.digest:
            error = f"{job.file} has changed since it was queued"
        if error:
            return self.queue.change(job, state=HELD, error=f"{error}; remove the job, and add it again")
        lane = self._lane(job, free)
        if lane is None or not self.queue.change(job, state=STARTING, attempt=job.attempt + 1, lane=lane):
            return False
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if lane != CPU:
            environment["CUDA_VISIBLE_DEVICES"] = lane
        log = self._log(job)
        log.parent.mkdir(exist_ok=True)
        program = "from pathlib import Path; from halfbyte.runs.queue import run_job; import sys; "
        program += "run_job(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
        with open(log, "ab") as output:
            self._children[job.id] = subprocess.Popen(
                [sys.executable, "-c", program, str(self.queue.folder.absolute()), str(job.id), str(job.attempt + 1)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )
        return True

    def _log(self, job: Job) -> Path:
        """File with the output of a job."""
        return self.queue.folder / LOGS / f"job-{job.id}.log"

    def _lane(self, job: Job, free: Mapping[str, int]) -> str | None:
        """Return the lane with the most free memory that takes this job now."""
        active = self.queue.jobs(*ACTIVE)
        busy = {other.lane for other in active if not _is_settled(other)}
        lane = max(free.keys() - busy, key=lambda name: free[name], default=None)
        return lane if lane is not None and free[lane] >= job.planned else None


def _is_settled(job: Job) -> bool:
    """Return whether a run has allocated the memory that it needs."""
    with contextlib.suppress(ConfigError):
        status = read_status(Path(job.output))
        return status is not None and status.process == job.process and status.step >= SETTLED_STEP
    return False


def work(folder: Path, free: Callable[[], Mapping[str, int]], started: Callable[[], object], poll: float = 1.0) -> None:
    """Run the jobs of a queue until none is left.

    Args:
        started: called when this process is the runner.
        poll: seconds between looks at the queue.

    Raises:
        ConfigError: another runner holds the queue.
    """
    runner = Runner(Queue(folder), free)
    with runner.locked():
        started()
        while runner.advance():
            time.sleep(poll)
