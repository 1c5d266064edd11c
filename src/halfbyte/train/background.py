"""Runs in a process of their own: `halfbyte.finetune(..., background=True)`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..config import dump_given, load_config
from ..reading import read_text
from ..report.run import read_run
from ..runs.inputs import check_output, check_paths
from ..runs.queue import queue_folder
from ..runs.status import RunStatus, read_status
from ..runs.stop import end_run
from ..utils.errors import ConfigError, TrainingError
from ..utils.files import write_text
from ..utils.text import duration
from .result import RunResult
from .run_folder import summarize_records

REFRESH_SECONDS = 1.0  # between two pictures of a run in a notebook
LOG_LINES = 20  # of a failed process that an error shows


@dataclass(frozen=True)
class BackgroundRun:
    """A run that trains in a process of its own. It goes on when this process ends.

    Attributes:
        output_dir: the run's folder.
        log: file with what `halfbyte train` prints.
    """

    output_dir: Path
    log: Path
    _process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, keys: Mapping[str, Any]) -> BackgroundRun:
        """Check the keys and start the run.

        Raises:
            HalfbyteError: a key is not valid, or a process of its own cannot be given it.
        """
        functions = keys.get("reward_funcs") or []
        if any(map(callable, functions if isinstance(functions, list) else [functions])):
            fix = "write FILE.py:NAME, or leave background out"
            raise ConfigError("reward_funcs: another process cannot call a function of this one", fix)
        if keys.get("hub_token"):
            raise ConfigError("hub_token: it is not written to a file", "set HF_TOKEN, or use `hf auth login`")
        config = load_config(None, dict(keys))
        check_output(config)
        check_paths(config)
        folder = queue_folder().parent / "background"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stem = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}"
        file, log = stem.with_suffix(".yaml"), stem.with_suffix(".log")
        write_text(file, dump_given(config))
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "halfbyte", "train", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt of a notebook's kernel does not reach it
            )
        return cls(config.output_path, log, process)

    @property
    def status(self) -> RunStatus | None:
        """The run's status; None until its process writes the first one."""
        with contextlib.suppress(ConfigError):
            return read_status(self.output_dir)
        return None

    def stop(self, now: bool = False) -> None:
        """End the run with a checkpoint; `now`: at once. Returns when it has ended.

        Raises:
            ConfigError: it has ended already.
        """
        if self._process.poll() is None and self._is_unknown():
            self._process.terminate()  # before its first status
        else:
            end_run(self.output_dir, now)
        self._process.wait()

    def wait(self, timeout: float | None = None) -> RunResult:
        """Return the result of the run when it has finished. A notebook shows the progress meanwhile.

        An interrupt ends only the waiting.

        Raises:
            TimeoutError: `timeout` seconds have passed; the run goes on.
            TrainingError: the run has failed or was stopped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with _display(self) as update:
            while self._process.poll() is None:
                pause = REFRESH_SECONDS if deadline is None else min(REFRESH_SECONDS, deadline - time.monotonic())
                if pause <= 0:
                    raise TimeoutError(f"{self.output_dir} has not finished after {timeout:g} seconds")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(pause)
                update()
        status = None if self._is_unknown() else self.status
        if self._process.returncode or status is None or status.state != "finished":
            state = "the run has failed" if status is None else f"the run is {status.state} at step {status.step}"
            lines = read_text(self.log, ConfigError).splitlines()[-LOG_LINES:]
            cause = status.error if status is not None and status.error else "\n".join(lines)
            raise TrainingError(f"{self.output_dir}: {state}: {cause}", f"see {self.log}")
        return self._result(status)

    def _is_unknown(self) -> bool:
        """Return whether the folder has no status, or the status of an earlier run."""
        status = self.status
        pids = () if status is None else (status.process.pid, status.launcher.pid if status.launcher else 0)
        return self._process.pid not in pids

    def _result(self, status: RunStatus) -> RunResult:
        run = read_run(self.output_dir)
        measured = (run.memory or {}).get("measured") or {}
        steps, peak = status.total_steps or status.step, measured.get("peak_bytes", 0)
        return RunResult(
            self.output_dir, summarize_records([*run.train, *run.evals], run.numbers, steps, peak, run.best)
        )

    def _repr_html_(self) -> str:
        """Return state, steps and last loss of the run, as notebooks show it."""
        status = self.status
        if status is None:
            return f"<p>{escape(str(self.output_dir))}: starting</p>"
        with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # a record is being written
            last = read_run(self.output_dir).train[-1]
            left = ((status.total_steps or status.step) - status.step) * last["step_seconds"]
            loss = f", loss {last['loss']:.4g}, about {duration(left)} left"
            return _progress(self.output_dir, status, loss if status.state == "training" else "")
        return _progress(self.output_dir, status, "")


def _progress(folder: Path, status: RunStatus, numbers: str) -> str:
    total = status.total_steps or 0
    bar = f'<progress value="{status.step}" max="{total}"></progress> ' if total else ""
    error = f": {escape(status.error)}" if status.error else ""
    steps = f"step {status.step:,} of {total:,}" if total else f"step {status.step:,}"
    return f"<p>{bar}{escape(str(folder))}: {status.state}{error}, {steps}{numbers}</p>"


@contextlib.contextmanager
def _display(run: BackgroundRun) -> Iterator[Any]:
    """Show a run in the output of a notebook's cell; gives a function that shows its present state."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):  # no notebook
        yield lambda: None
        return
    from IPython.display import display

    handle = display(run, display_id=True)
    yield lambda: handle.update(run)
