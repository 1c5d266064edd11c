"""The files of a run folder, and figures derived from them.

Any file may be missing (after a stopped run, or from an older version): its value is then None or empty. An unreadable
file is treated as missing and listed in `problems`, which the report shows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..config.yaml import read_mapping
from ..methods import METHODS, Numbers
from ..reading import parse_json, read_json, read_text
from ..runs import layout
from ..runs.metrics import describe_best, evaluation_of_weights, final_loss, last_records
from ..utils.errors import CheckpointError, HalfbyteError

Record = dict[str, Any]


@dataclass
class Run:
    """Contents of a run folder. `train` and `evals` are the records of metrics.jsonl by step."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    train: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    generations: list[Record] | None = None
    environment: dict[str, Any] | None = None
    checks: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    merge: dict[str, Any] | None = None
    merges: list[dict[str, Any]] = field(default_factory=list)  # of every merge, including merge.json
    sampled: list[Record] = field(default_factory=list)
    row_losses: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The base model as configured."""
        return str(self.config.get("model_name_or_path", "unknown model"))

    @property
    def last_steps(self) -> list[Record]:
        """The training records that `final_loss` is the mean of."""
        return last_records(self.train)

    @property
    def numbers(self) -> Numbers:
        """Metrics of the run's method; runs without this entry are supervised fine-tuning."""
        document = (self.environment or {}).get("numbers")
        return Numbers.of_document(document) if document else METHODS["sft"].numbers

    @property
    def best(self) -> dict[str, Any] | None:
        """The best evaluation, if the run compared evaluations."""
        return (self.environment or {}).get("best")

    @property
    def final_evaluation(self) -> Record:
        """The evaluation of the saved weights; the run must have evaluations."""
        return evaluation_of_weights(self.evals, self.best)

    @property
    def final_loss(self) -> float | None:
        """Mean loss over `last_steps`, weighted as the method does."""
        return final_loss(self.train, self.numbers.trained[0].over)

    @property
    def throughput(self) -> float | None:
        """Tokens per second over all recorded steps, excluding evaluations and saves."""
        timed = [record for record in self.train if record["tokens_per_second"]]
        seconds = sum(record["tokens"] / record["tokens_per_second"] for record in timed)
        return sum(record["tokens"] for record in timed) / seconds if seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(record["step_seconds"] for record in self.train) if self.train else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in bytes: measured in memory.json, else the largest in metrics.jsonl."""
        measured = (self.memory or {}).get("measured") or {}
        seen = [record["memory_bytes"] for record in self.train if record.get("memory_bytes")]
        return measured.get("peak_bytes") or max(seen, default=None)

    @property
    def wall_seconds(self) -> float | None:
        """Seconds from start to finish by environment.json, else between the first and the last metric."""
        started, finished = (self.moment(name) for name in ("started", "finished"))
        if started and finished:
            return (finished - started).total_seconds()
        times = [record["time"] for record in (*self.train, *self.evals) if "time" in record]
        return max(times) - min(times) if times else None

    def moment(self, name: str) -> datetime | None:
        """Time of `started` or `finished` in environment.json, given as Unix seconds or in ISO format."""
        value = (self.environment or {}).get(name)
        if value is None:
            return None
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def read_run(path: Path | str, *, records: bool = True) -> Run:
    """Read the files of a run that exist in `path`.

    Args:
        records: read metrics.jsonl; else there are no records.
    """
    run = Run(Path(path))
    config = run.path / layout.RESOLVED_CONFIG
    run.config_text = _read(run, config, read_text, CheckpointError) or ""
    run.config = {key: located.value for key, located in (_read(run, config, read_mapping) or {}).items()}
    for name, file, expected in (
        ("memory", layout.MEMORY, dict),
        ("data", layout.DATA_REPORT, dict),
        ("generations", layout.GENERATIONS, list),
        ("environment", layout.ENVIRONMENT, dict),
        ("checks", layout.CHECKS, dict),
        ("experts", layout.EXPERTS, dict),
        ("merge", layout.MERGE, dict),
    ):
        setattr(run, name, _json(run, run.path / file, expected))
    merge_reports = (_json(run, path, dict) for path in sorted(run.path.glob(layout.MERGE_REPORTS)))
    run.merges = [merge for merge in (run.merge, *merge_reports) if merge]
    _drop_malformed(run)
    if stopped := (run.environment or {}).get("stopped"):
        run.problems.append(f"the run was not finished: {stopped}")
    run.sampled = _sampled(run)
    run.row_losses = _row_losses(run)
    by_step = _metrics(run) if records else []
    run.train = [record for record in by_step if record["kind"] == layout.TRAIN]
    run.evals = [record for record in by_step if record["kind"] == layout.EVAL]
    return run


def _drop_malformed(run: Run) -> None:
    """Drop malformed values of environment.json and memory.json, and report them."""
    environment = run.environment or {}
    readers: dict[str, Callable[[], Any]] = {
        "numbers": lambda: run.numbers,
        "started": lambda: run.moment("started"),
        "finished": lambda: run.moment("finished"),
        "best": lambda: run.best and describe_best(run.best),
    }
    for name, read in readers.items():
        try:
            read()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError):
            del environment[name]
            run.problems.append(f"{layout.ENVIRONMENT}: {name} cannot be read and is ignored")
    measured = (run.memory or {}).get("measured") or {}
    if not isinstance(measured, dict) or not all(isinstance(value, int) for value in measured.values()):
        run.memory = None
        run.problems.append(f"{layout.MEMORY} cannot be read: its measured values are not numbers of bytes")


def _read(run: Run, path: Path, reader: Callable[..., Any], *arguments: Any) -> Any:
    """Read a file of the run with `reader`; None if it is missing or, with a problem reported, unreadable."""
    if not path.exists():
        return None
    try:
        return reader(path, *arguments)
    except HalfbyteError as error:
        run.problems.append(f"{path.name} cannot be read: {error.message}")
        return None


def _json(run: Run, path: Path, expected: type) -> Any:
    value = _read(run, path, read_json, CheckpointError)
    if value is None or isinstance(value, expected):
        return value
    run.problems.append(f"{path.name} cannot be read: it holds no {'list' if expected is list else 'object'}")
    return None


def _sampled(run: Run) -> list[Record]:
    """Records of the first and the last generation in completions.jsonl."""
    limit = layout.COMPLETIONS_PER_GENERATION
    lines = (_read(run, run.path / layout.COMPLETIONS, read_text, CheckpointError) or "").splitlines()
    try:
        first, last = (
            [parse_json(line, layout.COMPLETIONS, CheckpointError) for line in span]
            for span in (lines[:limit], lines[-limit:])
        )
        begin, end = ({record["step"] for record in span} for span in (first[:1], last[-1:]))
        shown = [record for record in first if record["step"] in begin]
        return shown + [record for record in last if record["step"] in end - begin]
    except (HalfbyteError, KeyError, TypeError):
        run.problems.append(f"{layout.COMPLETIONS} has lines that cannot be read and is ignored")
        return []


def _row_losses(run: Run) -> list[Record]:
    """Lines of row_losses.jsonl."""
    lines = (_read(run, run.path / layout.ROW_LOSSES, read_text, CheckpointError) or "").splitlines()
    try:
        documents = [parse_json(line, layout.ROW_LOSSES, CheckpointError) for line in lines]
        return [document for document in documents if isinstance(document, dict)]
    except HalfbyteError:
        run.problems.append(f"{layout.ROW_LOSSES} has lines that cannot be read and is ignored")
        return []


def _metrics(run: Run) -> list[Record]:
    """Records of metrics.jsonl by step. A resumed run repeats the steps after its checkpoint: the later line counts.

    A killed run may leave half a line, which is skipped and reported.
    """
    text = _read(run, run.path / layout.METRICS, read_text, CheckpointError) or ""
    records: dict[tuple[str, int], Record] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, layout.METRICS, CheckpointError, line=number)
            records[str(record["kind"]), int(record["step"])] = record
        except (HalfbyteError, ValueError, KeyError, TypeError):
            run.problems.append(f"{layout.METRICS} line {number} cannot be read and is ignored")
    return [record for _, record in sorted(records.items(), key=lambda item: item[0][1])]
