"""`halfbyte ps`, `stop` and `explain`: see, stop and judge runs from another terminal. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from ..runs.layout import METRICS, RESOLVED_CONFIG
from ..runs.status import ENDED, RUNNING, RunStatus, read_status, run_folders
from ..runs.stop import end_run
from ..utils.console import Console
from ..utils.errors import ConfigError
from ..utils.text import one_line
from ..utils.waiting import showing_waits, waiting

UNREADABLE = "unreadable"
WIDE = 10_000  # columns of a table that is written to a file or a pipe: a line for each run


def print_runs(folders: Sequence[Path]) -> None:
    """Print the runs in `folders` and below, running ones first, then by their last heartbeat.

    Raises:
        ConfigError: a folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", "name folders with runs; default: the current one")
    rows = []
    for folder in dict.fromkeys(path for root in folders for path in run_folders(root)):
        try:
            status = read_status(folder)
        except ConfigError as error:
            rows.append((2, 0.0, [str(folder), UNREADABLE, "", "", "", error.message]))
            continue
        if status is not None:  # else it vanished
            rows.append((int(status.has_ended), -status.heartbeat, _row(status)))
    console = Console()
    if not rows:
        console.print(one_line(f"no runs in {', '.join(map(str, folders))}"), soft_wrap=True)
        return
    table = Table(box=None)
    for column in ("run", "state", "step", "process", "updated", ""):
        table.add_column(column, overflow="fold")
    for _, _, row in sorted(rows, key=lambda entry: entry[:2]):
        table.add_row(*map(one_line, row))
    Console(width=None if console.is_terminal else WIDE).print(table)


def _row(status: RunStatus) -> list[str]:
    steps = "" if status.total_steps is None else f"{status.step}/{status.total_steps}"
    process = "" if status.state in ENDED else f"{status.process.pid} on {status.host}"
    return [str(status.folder), status.state, steps, process, _ago(time.time() - status.heartbeat), status.error]


def _ago(seconds: float) -> str:
    """Return a time in the past in its largest unit; one in the future, after the clock was set back, is now."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def stop_run(run: Path, now: bool) -> None:
    """Stop a run as the first Ctrl-C does, with a checkpoint; `now`: as the second one does. Returns when it has ended.

    Raises:
        ConfigError: the folder has no run, the run has ended, or its process is another machine's or user's.
    """
    console = Console()
    with showing_waits(console), waiting("ending the run" if now else "ending the run: it saves a checkpoint"):
        folders = end_run(run, now)
    for folder in folders:
        console.print(one_line(_describe_end(folder)), soft_wrap=True)


def explain_run(run: Path) -> None:
    """Print what stands out in a run, the most severe finding first.

    Raises:
        ConfigError: the folder is no run.
    """
    from ..report.explain import SEVERITIES, explain
    from ..report.run import read_run

    if not any((run / name).is_file() for name in (METRICS, RESOLVED_CONFIG)):
        raise ConfigError(f"{run} is no run", "name the output_dir of a run; `halfbyte ps FOLDER` lists runs")
    contents, console = read_run(run), Console()
    findings = explain(contents)
    for finding in findings:
        console.print(one_line(f"{SEVERITIES[finding.severity]}: {finding.problem}"), soft_wrap=True)
        console.print(one_line(f"  {finding.evidence}"), soft_wrap=True)
        console.print(one_line(f"  {finding.effect}: {finding.keys}"), soft_wrap=True)
    if not findings:
        console.print(one_line(f"nothing stands out in {run} ({len(contents.train)} training records)"), soft_wrap=True)


def _describe_end(folder: Path) -> str:
    status = read_status(folder)
    if status is None:
        return f"{folder}: ended before its first step, and wrote nothing"
    if status.state in RUNNING:
        return f"{folder}: another process continues it"
    steps = "" if status.total_steps is None else f" after step {status.step} of {status.total_steps}"
    return f"{folder}: {status.state}{steps}" + (f": {status.error}" if status.error else "")
