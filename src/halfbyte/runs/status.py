"""Status of a run: `status.json`, which a thread of the run writes, and which other processes read. Imports no torch.

The run only assigns attributes of its `Progress`. The thread of `report_status` reads them every `INTERVAL` seconds,
and writes if something changed or the last heartbeat is `HEARTBEAT` seconds old. So the file is at most `INTERVAL`
seconds late, and a training step stores one integer for it. Only the end of a run is written at once.

A run that is killed cannot write its end. Readers therefore call it lost when its process has ended or when its
heartbeats stop (`read_status`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..reading import look, read_json
from ..utils.errors import ConfigError, HalfbyteError, explain_os_error
from ..utils.files import FORMER, temporary_path
from ..utils.notices import notice
from ..utils.processes import LAUNCHER, Process
from ..utils.text import message
from .layout import ADAPTERS, RESOLVED_CONFIG, STATUS
from .lock import run_lock

INTERVAL = 2.0  # seconds between writes
HEARTBEAT = 10.0  # seconds between writes if nothing changes
LOST_AFTER = 60.0  # seconds without a heartbeat
LARGEST = 1 << 20  # bytes of a status.json that is read

RunningState = Literal["preparing", "loading", "training", "evaluating", "saving"]
EndState = Literal["finished", "stopped", "failed"]
RUNNING: tuple[str, ...] = ("preparing", "loading", "training", "evaluating", "saving")
ENDED: tuple[str, ...] = ("finished", "stopped", "failed")
LOST = "lost"  # of readers only


class Progress:
    """Current state and step of a run, in memory only; `report_status` writes them to status.json.

    Attributes:
        state: one of `RUNNING` and `ENDED`.
        error: message of the error of a failed run.
        step: optimizer steps that were launched; the device may be one behind.
        total_steps: None while the run is prepared.
        ended_while: the state before the end; None while it runs.
    """

    def __init__(self) -> None:
        self.state: RunningState | EndState = "preparing"
        self.error = ""
        self.step = 0
        self.total_steps: int | None = None
        self.ended_while: str | None = None

    @contextlib.contextmanager
    def during(self, state: RunningState) -> Iterator[None]:
        """Set the state within the context."""
        previous, self.state = self.state, state
        try:
            yield
        finally:
            self.state = previous

    @contextlib.contextmanager
    def ends(self) -> Iterator[None]:
        """Set the state in which the code within the context ends; of nested contexts the first end counts."""
        try:
            yield
        except GeneratorExit:  # the error of another adapter's run ends this one, and reaches an outer context
            raise
        except KeyboardInterrupt:
            self.end("stopped")
            raise
        except BaseException as error:
            text = error.message if isinstance(error, HalfbyteError) else f"{type(error).__name__}: {error}"
            self.end("failed", message(text))
            raise
        self.end("finished")

    def end(self, state: EndState, error: str = "") -> None:
        """Set the state of the run's end, unless it has ended."""
        if self.state not in ENDED:
            self.error = error
            self.ended_while = self.state
            self.state = state

    def document(self) -> dict[str, Any]:
        return {"state": self.state, "error": self.error, "step": self.step, "total_steps": self.total_steps}


@contextlib.contextmanager
def report_status(output: Path) -> Iterator[Progress]:
    """Lock the folder of a run (`run_lock`), and write its status.json from a thread, until the context ends.

    A run that is refused while it is prepared, or that had finished before, leaves the earlier status.json as it was. A
    run that ends without a step leaves none, like its other files.

    Raises:
        ConfigError: as `run_lock`.
    """
    file = output / STATUS
    progress = Progress()
    ended = threading.Event()
    with run_lock(output):
        former = temporary_path(file, FORMER)
        had_finished = _has_finished(output)
        with contextlib.suppress(OSError):
            os.replace(file, former)
        thread = threading.Thread(target=_write_until, args=(file, progress, ended), name=STATUS, daemon=True)
        thread.start()
        try:
            with progress.ends():
                yield progress
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(OSError):
                is_unchanged = progress.ended_while == "preparing" and (progress.state != "finished" or had_finished)
                if is_unchanged or not (output / RESOLVED_CONFIG).exists():
                    file.unlink()
                if is_unchanged and former.exists():
                    os.replace(former, file)
                former.unlink(missing_ok=True)


def _has_finished(output: Path) -> bool:
    try:
        status = read_status(output)
    except ConfigError:
        return False
    return status is not None and status.state == "finished"


def _write_until(file: Path, progress: Progress, ended: threading.Event) -> None:
    """Write the status now, then when it is due, and once more when `ended` is set."""
    process, launcher = Process.current(), os.environ.get(LAUNCHER)
    identity = {
        "host": socket.gethostname(),
        **process._asdict(),
        "launcher": None if launcher is None else Process.of_pid(int(launcher))._asdict(),
        "started": time.time(),
    }
    last: dict[str, Any] | None = None
    last_time = 0.0
    while True:
        is_last = ended.is_set()
        document, uptime = progress.document(), time.monotonic()
        if document != last or uptime - last_time >= HEARTBEAT:
            last, last_time = document, uptime
            text = json.dumps(document | identity | {"heartbeat": time.time(), "uptime": uptime}, indent=2)
            _write(file, f"{text}\n".encode())
        if is_last:
            return
        ended.wait(INTERVAL)


def _write(file: Path, content: bytes) -> None:
    """Replace a file atomically, without flushing it to disk; a folder that has vanished is not made again."""
    temporary = temporary_path(file)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    except FileNotFoundError:
        pass
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        notice("status", f"cannot write {file}: {explain_os_error(error)}; `halfbyte ps` shows this run as {LOST}")


# --- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    """A run as its status.json and the machine's processes show it.

    Attributes:
        folder: of the run.
        state: one of `RUNNING`, `ENDED` and `LOST`.
        error: message of the error of a failed run; of a lost one, why it is called lost.
        total_steps: None if the run was prepared when it was written.
        process: the run's (of several, rank 0).
        launcher: the process that started the ranks and forwards signals to them; None for one process, or torchrun.
        heartbeat: Unix time of the last write.
    """

    folder: Path
    state: str
    error: str
    step: int
    total_steps: int | None
    host: str
    process: Process
    launcher: Process | None
    heartbeat: float

    @property
    def has_ended(self) -> bool:
        return self.state not in RUNNING


def read_status(folder: Path) -> RunStatus | None:
    """Return the status of the run in `folder`; None if it has none.

    A run is lost if its process has ended, or if its last heartbeat is older than `LOST_AFTER`. On the machine of the
    run heartbeats are compared on the monotonic clock, which neither changes of the date nor a sleeping machine move.
    From another machine only the date can be compared; a heartbeat from the future counts as new.

    Raises:
        ConfigError: status.json is not one.
    """
    file = folder / STATUS
    if not look(file, ConfigError):
        return None
    document = read_json(file, ConfigError, "remove it", LARGEST)
    try:
        process, total = _process(document), document["total_steps"]
        status = RunStatus(
            folder=folder,
            state=str(document["state"]),
            error=str(document["error"]),
            step=int(document["step"]),
            total_steps=None if total is None else int(total),
            host=str(document["host"]),
            process=process,
            launcher=None if document["launcher"] is None else _process(document["launcher"]),
            heartbeat=float(document["heartbeat"]),
        )
        uptime = float(document["uptime"])
        if not math.isfinite(status.heartbeat + uptime):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{file} is not the status of a run", "remove it") from error
    if status.state not in (*RUNNING, *ENDED):
        raise ConfigError(f"{file}: state is unknown", "remove it, or read it with the halfbyte that wrote it")
    if status.has_ended or (reason := _why_lost(status, uptime)) is None:
        return status
    return RunStatus(**{**vars(status), "state": LOST, "error": reason})


def _process(document: dict[str, Any]) -> Process:
    return Process(str(document["machine"]), int(document["pid"]), int(document["since"]))


def _why_lost(status: RunStatus, uptime: float) -> str | None:
    running = status.process.is_running
    if running is False:
        return f"process {status.process.pid} ended while {status.state}"
    age = time.time() - status.heartbeat if running is None else time.monotonic() - uptime
    if age > LOST_AFTER:
        return f"no heartbeat of process {status.process.pid} on {status.host} for {age:.0f} s, while {status.state}"
    return None


# --- finding and stopping --------------------------------------------------------------------------------------------

DEEPEST = 4  # folders below a given one in which runs are searched


def names_in(folder: Path) -> dict[str, bool]:
    """Return the names in a folder, and whether each is a folder and no link.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}


def run_folders(
    root: Path, depth: int = DEEPEST, listing: Callable[[Path], dict[str, bool]] = names_in
) -> Iterator[Path]:
    """Yield the folders with a status.json in `root` and below it; links and hidden folders are not followed.

    Inside a run's folder, only the folders of its several adapters are searched.

    Args:
        listing: `names_in`, or a function that caches its results.
    """
    try:
        names = listing(root)
    except OSError:  # it vanished, or may not be read
        return
    if STATUS in names:
        yield root
    is_run = STATUS in names or RESOLVED_CONFIG in names
    for name in sorted(names):
        if names[name] and not name.startswith(".") and depth and (not is_run or name == ADAPTERS):
            yield from run_folders(root / name, depth - 1, listing)


def statuses_of(run: Path) -> list[RunStatus]:
    """Return the status of a run, or those of its several adapters.

    Raises:
        ConfigError: it has none.
    """
    folders = [run] if (run / STATUS).exists() else sorted((run / ADAPTERS).glob(f"*/{STATUS}"))
    statuses = [read_status(folder if folder == run else folder.parent) for folder in folders]
    if not any(statuses):
        raise ConfigError(f"{run} has no {STATUS}", "name the output_dir of a run; `halfbyte ps FOLDER` lists runs")
    return [status for status in statuses if status is not None]


def stop_processes(statuses: list[RunStatus]) -> list[Process]:
    """Return the processes whose end ends these runs: their launcher, or else their own.

    Raises:
        ConfigError: no run is left to stop, or one is on another machine.
    """
    processes: dict[Process, None] = {}
    for status in statuses:
        if status.state in ENDED:
            continue
        if status.process.is_running is None:
            wrong = f"{status.folder}: process {status.process.pid} of the run is on {status.host}"
            raise ConfigError(wrong, f"stop it there, or in its container: halfbyte stop {status.folder}")
        if status.process.is_running:
            launcher = status.launcher
            processes[launcher if launcher is not None and launcher.is_running else status.process] = None
    if not processes:
        first = statuses[0]
        state = f"it is {first.state}" + (f": {first.error}" if first.error else "")
        fix = (
            "continue it with halfbyte train ... --resume" if first.state != "finished" else "there is nothing to stop"
        )
        raise ConfigError(f"{first.folder}: the run has ended; {state}", fix)
    return list(processes)
