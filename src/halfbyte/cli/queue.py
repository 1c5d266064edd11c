"""`halfbyte queue`: add runs to the queue, change it, and start its runner. Only `add` imports torch."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..utils.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from ..config import RunConfig

MOST_RUNS = 64  # that one `add` makes
LOG = "runner.log"
_PAIR = re.compile(r"(?:--)?([A-Za-z][\w-]*)=(.*)", re.DOTALL)

queue_app = typer.Typer(help="Queue runs, and run them one after another.", no_args_is_help=True, rich_markup_mode=None)


@queue_app.command("add", context_settings={"ignore_unknown_options": True})
def add(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN.YAML | MODEL DATA | KEY=VALUE", help="as for train; KEY=A,B,C: a run for each value"
        ),
    ],
) -> None:
    """Check a run, or a grid of runs, and append it."""
    from ..runs.queue import Queue, queue_folder
    from ..utils.console import Console
    from ..utils.text import one_line, size
    from ..utils.waiting import showing_waits

    with showing_waits(Console()):
        entries = [_entry(words, keys) for words, keys in grid(run)]
    numbers = Queue(queue_folder()).add(entries)
    for number, entry in zip(numbers, entries, strict=True):
        line = f"job {number}: {entry['output']}, planned {size(entry['planned'])}"
        Console().print(one_line(line), soft_wrap=True)


@queue_app.command("list")
def list_jobs() -> None:
    """List all jobs, in order."""
    from rich.table import Table

    from ..runs.queue import Queue, digest_of, queue_folder
    from ..utils.console import Console
    from ..utils.text import one_line, size
    from .watch import WIDE

    table = Table(box=None)
    for column in ("job", "state", "run", "keys", "planned", "on", ""):
        table.add_column(column, overflow="fold")
    for job in Queue(queue_folder()).jobs():
        is_changed = job.state == "queued" and job.file and digest_of(job.file) != job.digest
        remark = f"{job.file} has changed since it was queued" if is_changed else job.error
        row = [str(job.id), job.state, job.output, job.keys, size(job.planned), job.lane, remark]
        table.add_row(*map(one_line, row))
    Console(width=None if Console().is_terminal else WIDE).print(table if table.rows else "the queue is empty")


@queue_app.command("move")
def move(
    job: Annotated[int, typer.Argument(metavar="JOB", help="its number")],
    place: Annotated[int, typer.Argument(metavar="PLACE", min=1, help="place among the waiting jobs; 1: next")],
) -> None:
    """Move a waiting job to another place."""
    from ..runs.queue import Queue, queue_folder

    Queue(queue_folder()).move(job, place)


@queue_app.command("remove")
def remove(job: Annotated[int, typer.Argument(metavar="JOB", help="its number")]) -> None:
    """Remove a job that does not run."""
    from ..runs.queue import Queue, queue_folder

    Queue(queue_folder()).remove(job)


@queue_app.command("run")
def run_queue(
    gpus: Annotated[
        str | None, typer.Option("--gpus", metavar="0,1", help="GPUs that jobs may use; default: all.")
    ] = None,
) -> None:
    """Start the runner, which outlives this terminal."""
    from ..runs.queue import queue_folder
    from ..utils.console import Console
    from ..utils.text import one_line

    folder = queue_folder()
    chosen = _gpus(gpus)
    pid = start_runner(folder, chosen)
    on = f"GPU {', '.join(chosen)}" if chosen else "the CPU"
    line = f"process {pid} runs the queue on {on}, and ends when no job is left; see `halfbyte queue list`"
    Console().print(one_line(line), soft_wrap=True)


# --- adding ----------------------------------------------------------------------------------------------------------


def grid(words: Sequence[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Return the words of each run of a grid, and the values in which it differs from the others.

    A value with commas outside of brackets and quotes is an axis: `r=8,16` makes two runs, `target_modules=[a,b]` one.
    Runs of a grid have folders below `output_dir`.

    Raises:
        UsageError: an axis has an empty or repeated value, or there are more than `MOST_RUNS` runs.
    """
    axes: dict[str, list[str]] = {}
    fixed = []
    for word in words:
        match = _PAIR.fullmatch(word) if not os.path.exists(word) else None
        values = _split(match[2]) if match else []
        if match is None or len(values) == 1:
            fixed.append(word)
            continue
        if "" in map(str.strip, values) or len(set(values)) < len(values):
            raise UsageError(f"{word} has an empty or a repeated value", f"list each value of {match[1]} once")
        axes[match[1].replace("-", "_")] = values
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(points) > MOST_RUNS:
        raise UsageError(f"the grid has {len(points)} runs, and `queue add` takes {MOST_RUNS}", "list fewer values")
    return [([*fixed, *(f"{key}={value}" for key, value in point.items())], point) for point in points]


def _split(value: str) -> list[str]:
    """Split a value at its commas outside of brackets and quotes."""
    values = [""]
    depth = 0
    quote = ""
    for character in value:
        if character in "\"'":
            quote = "" if quote == character else quote or character
        depth += (character in "[{") - (character in "]}") if not quote else 0
        if character == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return values


def _entry(words: list[str], point: Mapping[str, str]) -> dict[str, Any]:
    """Check a run as `halfbyte check` does, and return its job for `Queue.add`.

    Raises:
        HalfbyteError: `halfbyte train` would refuse it on a free machine; or the queue cannot run it.
    """
    from .arguments import read_run

    config = read_run("queue add", words)
    if point:
        name = "_".join(f"{key}-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', value).strip('-')}" for key, value in point.items())
        other_words = [word for word in words if not word.removeprefix("--").startswith("output_dir=")]
        words = [*other_words, f"output_dir={config.output_path / name}"]
        config = read_run("queue add", words)
    if config.trains_several:
        fix = "give the values as KEY=A,B to `halfbyte queue add`, or start this run with `halfbyte train`"
        raise ConfigError("adapters and sweep: the queue runs one adapter a job", fix)
    if config.layout is not None and config.layout.size > 1:
        raise ConfigError(f"{config.written('parallel')}: the queue runs a job on one GPU", "set parallel: {data: 1}")
    if config.device is not None and ":" in config.device:
        raise ConfigError(
            f"device: {config.device}: the runner chooses the GPU", "remove device, or write device: cuda"
        )
    planned, on_gpu = _plan(config)
    file = next((word for word in words if word.endswith((".yaml", ".yml")) and os.path.isfile(word)), None)
    return {
        "command": ["-m", "halfbyte", "train", *words],
        "folder": os.getcwd(),
        "output": str(config.output_path.absolute()),
        "keys": " ".join(f"{key}={value}" for key, value in point.items()),
        "file": "" if file is None else str(Path(file).absolute()),
        "planned": planned,
        "on_gpu": int(on_gpu),
    }


def _plan(config: RunConfig) -> tuple[int, bool]:
    """Return the planned bytes of a run on a free device, and whether that is a GPU."""
    from ..runs.inputs import check_output, check_paths
    from .startup import quick_imports

    check_output(config)
    check_paths(config)
    with quick_imports():
        from ..train.preflight import check_disk, prepare_run
        from ..utils.hardware import chosen_device, device_bytes

    prepared = prepare_run(config, writes=False, capacity_bytes=device_bytes(chosen_device(config.device)))
    check_disk(prepared)
    return prepared.plan.total, prepared.machine.device.type != "cpu"


# --- running ---------------------------------------------------------------------------------------------------------


def _gpus(written: str | None) -> list[str]:
    """Return the indices of the GPUs for jobs.

    Raises:
        UsageError: a GPU that is named does not exist.
    """
    present = list(_free_of_gpus())
    if written is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return present if visible is None else [index for index in present if index in visible.split(",")]
    chosen = [index.strip() for index in written.split(",")]
    if wrong := next((index for index in chosen if index not in present), None):
        has = f"this machine has {', '.join(present)}" if present else "nvidia-smi lists none"
        raise UsageError(f"--gpus {written}: there is no GPU {wrong}", has)
    return chosen


def _free_of_gpus() -> dict[str, int]:
    """Return the free bytes of each GPU by its index, as nvidia-smi lists them."""
    command = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        rows = [line.split(",") for line in listed.splitlines()]
        return {index.strip(): int(free) << 20 for index, free in rows}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def _free_bytes(gpus: Iterable[str]) -> dict[str, int]:
    """Return the free bytes of the chosen GPUs and of the host."""
    from ..memory.allocators import available_bytes
    from ..runs.queue import CPU

    free = _free_of_gpus() if gpus else {}
    return {CPU: available_bytes(), **{index: free.get(index, 0) for index in gpus}}


def start_runner(folder: Path, gpus: Sequence[str]) -> int:
    """Start the runner in a session of its own; returns its PID.

    Raises:
        ConfigError: another runner holds the queue, or this one has ended at once.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = "import sys; from halfbyte.cli.queue import be_runner; be_runner(*sys.argv[1:])"
    with open(folder / LOG, "ab") as log:
        runner = subprocess.Popen(
            [sys.executable, "-c", program, str(folder.absolute()), ",".join(gpus)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert runner.stdout is not None
    with runner.stdout as answers:
        answer = answers.readline()
    if not answer:
        raise ConfigError("the runner has ended at once", f"see {folder / LOG}")
    if error := json.loads(answer):
        raise ConfigError(*error)
    return runner.pid


def be_runner(folder: str, gpus: str) -> None:
    """Run the queue in this process. Prints a line of JSON when it has begun: [], or message and fix of an error."""
    from ..runs.queue import work

    def answer(*error: str) -> None:
        os.write(1, json.dumps(error).encode() + b"\n")

    free: Callable[[], Mapping[str, int]] = partial(_free_bytes, gpus.split(",") if gpus else [])
    try:
        work(Path(folder), free, answer)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        try:
            answer(error.message, error.fix)
        except OSError:  # the command that started it has ended
            sys.exit(1)
