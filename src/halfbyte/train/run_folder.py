"""A prepared run's folder is opened: what a stopped run left is cleared away, and the first files are written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.config import RunConfig, dump_config, dump_given
from halfbyte.plan.policy import describe_levels
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.files import write_json, write_text
from halfbyte.utils.notices import notices_so_far

from ..reading import read_json, read_text
from ..runs.layout import (
    COMPLETIONS,
    DATA_REPORT,
    ENVIRONMENT,
    FIRST,
    GIVEN_CONFIG,
    LAST,
    MEMORY,
    METRICS,
    RESOLVED_CONFIG,
    WEIGHTS,
)
from ..utils.text import one_line
from . import checkpoint as checkpoints
from .metrics import MetricsFile
from .preflight import PreparedRun

MARK = "# Written by halfbyte: the keys that were given."


@dataclass(frozen=True)
class OpenRun:
    """A run that writes into its folder, which is locked.

    Attributes:
        prepared: what was known before.
        output: the folder.
        metrics: its metrics.jsonl.
    """

    prepared: PreparedRun
    output: Path
    metrics: MetricsFile


@contextlib.contextmanager
def open_run(prepared: PreparedRun, resume: str | bool | None) -> Iterator[OpenRun]:
    """Write the `FIRST` files; where the run ends before it has made a step, they go again.

    Args:
        resume: that `prepared` was prepared with.

    Raises:
        ConfigError: another run has written into the folder meanwhile.
        TrainingError: it cannot be written.
    """
    config, output = prepared.config, prepared.config.output_path
    run = OpenRun(prepared, output, MetricsFile(output / METRICS))
    if not prepared.mesh.is_main:
        yield run
        return
    # Sizes alone tell, but of a damaged checkpoint that has its size and was passed over.
    if all(checkpoints.starting_point(config, resume, contents=read) != prepared.checkpoint for read in (False, True)):
        raise ConfigError(f"output_dir: another run has saved a checkpoint in {output} meanwhile", "start again")
    try:
        _write_first(run)
        yield run
    finally:
        if not (prepared.checkpoint or checkpoints.results_in(output)):
            for name in (*FIRST, COMPLETIONS, *([GIVEN_CONFIG] if _is_ours(output / GIVEN_CONFIG) else [])):
                (output / name).unlink(missing_ok=True)


def finished_measures(prepared: PreparedRun) -> dict[str, int] | None:
    """What the run to continue has measured (bytes), where its weights and all its numbers are written; else None.

    environment.json says that a run has finished after all of these, and before what is made from them: `PAGES`.
    """
    output, checkpoint = prepared.config.output_path, prepared.checkpoint
    if checkpoint is None or checkpoints.step_of(checkpoint) < prepared.total_steps:
        return None
    if checkpoint.parent.resolve() != output.resolve() or not (output / saved_in(prepared.config)).is_dir():
        return None
    if not all((output / name).is_file() for name in LAST):
        return None
    environment, memory = (read_json(output / name, ConfigError, "remove it, and run again") for name in LAST[-2:])
    if not isinstance(environment, dict) or not environment.get("finished") or "stopped" in environment:
        return None
    measured = memory.get("measured") if isinstance(memory, dict) else None
    sound = isinstance(measured, dict) and "peak_bytes" in measured and all(type(n) is int for n in measured.values())
    return measured if sound else None


def saved_in(config: RunConfig) -> str:
    """The folder of a finished run's weights."""
    return WEIGHTS[0 if config.use_peft else 1]


def _write_first(run: OpenRun) -> None:
    output, checkpoint = run.output, run.prepared.checkpoint
    output.mkdir(parents=True, exist_ok=True)
    checkpoints.remove_leftovers(output)
    if checkpoint:
        checkpoints.set_aside_newer(output, checkpoint)
    run.metrics.keep_until(checkpoints.step_of(checkpoint) if checkpoint else -1)
    write_text(output / RESOLVED_CONFIG, dump_config(run.prepared.config))
    _write_short(output / GIVEN_CONFIG, run.prepared.config)
    write_json(output / DATA_REPORT, run.prepared.data.report)
    write_memory(run, {})
    write_environment(run)


def _write_short(file: Path, config: RunConfig) -> None:
    """What this run was asked for, as a file that `halfbyte train` takes; a file of the user's own stays."""
    if not file.exists() or _is_ours(file):
        again = one_line(f"halfbyte train {file} output_dir=NEW")
        write_text(file, f"{MARK} `{again}` does the same again.\n{dump_given(config)}")


def _is_ours(file: Path) -> bool:
    try:
        return read_text(file, ConfigError).startswith(MARK)
    except ConfigError:
        return False


def write_memory(run: OpenRun, measured: dict[str, int], ranks: Sequence[dict[str, int]] = ()) -> None:
    """memory.json: what was planned (bytes, layers that stay gathered, or whose slices or experts the host has,
    seconds of a step), and what was measured so far (bytes); `ranks`: in each of several processes."""
    plan = run.prepared.plan
    document = {
        "device": str(run.prepared.machine.device),
        "capacity_bytes": plan.capacity_bytes,
        "predicted": plan.predicted(),
        "measured": measured,
        "activation_checkpointing": plan.activation_checkpointing,
        "levels": describe_levels(plan.levels),
        "cuda_graphs": plan.use_graphs,
        "stays": list(plan.stays),
        "hosted": list(plan.hosted),
        "offloaded": list(plan.offloaded),
        "step_seconds": plan.seconds,
        "reason": plan.reason,
    }
    if plan.answering is not None:
        document["rollouts"] = asdict(plan.answering)
    if len(ranks) > 1:
        document["ranks"] = list(ranks)
    write_json(run.output / MEMORY, document)


def write_environment(run: OpenRun, **more: Any) -> None:
    """environment.json, with everything announced so far; `more` is known at a run's end."""
    facts = run.prepared.machine.facts | {"finished": None} | more
    mesh = run.prepared.mesh
    if mesh.size > 1:
        facts |= {"processes": mesh.size, "parallel": str(mesh.layout)}
    write_json(run.output / ENVIRONMENT, facts | {"notices": notices_so_far()})
