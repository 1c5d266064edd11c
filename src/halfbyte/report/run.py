"""The files of a run directory, and the figures derived from them.

Any file may be missing (a run that was stopped, an older version): its value is then None or empty. A file that is
there but cannot be read is treated as missing and named in `problems`, which the report shows.
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
from ..utils.errors import CheckpointError, HalfbyteError

Record = dict[str, Any]


@dataclass
class Run:
    """One run directory, read. `train` and `evals` are the records of metrics.jsonl by step."""

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
    merges: list[dict[str, Any]] = field(default_factory=list)  # each target's, merge.json among them
    sampled: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        """The base model as configured."""
        return str(self.config.get("model_name_or_path", "unknown model"))

    @property
    def last_steps(self) -> list[Record]:
        """The last tenth of the training records: one step's loss is too noisy to be the final one."""
        return self.train[-max(1, len(self.train) // 10) :]

    @property
    def numbers(self) -> Numbers:
        """What its method's records hold; a run of an earlier version was supervised fine-tuning."""
        document = (self.environment or {}).get("numbers")
        return Numbers.of_document(document) if document else METHODS["sft"].numbers

    @property
    def final_loss(self) -> float | None:
        """Mean loss over `last_steps`, each weighed as its method does."""
        records, over = self.last_steps if self.train else [], self.numbers.trained[0].over
        weights = [record.get(over) or 1 for record in records]
        if not records:
            return None
        return sum(record["loss"] * weight for record, weight in zip(records, weights, strict=True)) / sum(weights)

    @property
    def throughput(self) -> float | None:
        """Tokens per second over all recorded steps; evaluations and saves are not in it."""
        timed = [record for record in self.train if record["tokens_per_second"]]
        seconds = sum(record["tokens"] / record["tokens_per_second"] for record in timed)
        return sum(record["tokens"] for record in timed) / seconds if seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(record["step_seconds"] for record in self.train) if self.train else None

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory: as measured in memory.json, else the largest that metrics.jsonl saw."""
        measured = (self.memory or {}).get("measured") or {}
        seen = [record["memory_bytes"] for record in self.train if record.get("memory_bytes")]
        return measured.get("peak_bytes") or max(seen, default=None)

    @property
    def wall_seconds(self) -> float | None:
        """From start to finish by environment.json, else between the first and the last metric."""
        started, finished = (self.moment(name) for name in ("started", "finished"))
        if started and finished:
            return (finished - started).total_seconds()
        times = [record["time"] for record in (*self.train, *self.evals) if "time" in record]
        return max(times) - min(times) if times else None

    def moment(self, name: str) -> datetime | None:
        """`started` or `finished` of environment.json, written as Unix seconds or in ISO format."""
        value = (self.environment or {}).get(name)
        if value is None:
            return None
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        moment = datetime.fromisoformat(value)
        return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def read_run(path: Path | str) -> Run:
    """Read whatever `path` holds of a run's files."""
    run = Run(Path(path))
    config = run.path / "config.resolved.yaml"
    run.config_text = _read(run, config, read_text, CheckpointError) or ""
    run.config = {key: found.value for key, found in (_read(run, config, read_mapping) or {}).items()}
    for name, file, kind in (
        ("memory", "memory.json", dict),
        ("data", "data_report.json", dict),
        ("generations", "generations.json", list),
        ("environment", "environment.json", dict),
        ("checks", "checks.json", dict),
        ("experts", "experts.json", dict),
        ("merge", "merge.json", dict),
    ):
        setattr(run, name, _json(run, run.path / file, kind))
    others = (_json(run, path, dict) for path in sorted(run.path.glob("merge-*.json")))
    run.merges = [each for each in (run.merge, *others) if each]
    _leave_out_unreadable(run)
    if stopped := (run.environment or {}).get("stopped"):
        run.problems.append(f"the run was not finished: {stopped}")
    records = _metrics(run)
    run.train = [record for record in records if record["kind"] == "train"]
    run.sampled = _sampled(run)
    run.evals = [record for record in records if record["kind"] == "eval"]
    return run


def _leave_out_unreadable(run: Run) -> None:
    """Values that somebody has changed to what they cannot be."""
    environment = run.environment or {}
    readers: dict[str, Callable[[], Any]] = {
        "numbers": lambda: run.numbers,
        "started": lambda: run.moment("started"),
        "finished": lambda: run.moment("finished"),
    }
    for name, read in readers.items():
        try:
            read()
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, OSError):
            del environment[name]
            run.problems.append(f"environment.json: {name} cannot be read and is left out")
    measured = (run.memory or {}).get("measured") or {}
    if not isinstance(measured, dict) or not all(isinstance(value, int) for value in measured.values()):
        run.memory = None
        run.problems.append("memory.json cannot be read: what it measured are no numbers of bytes")


def _read(run: Run, path: Path, reader: Callable[..., Any], *how: Any) -> Any:
    """What a reader finds in a file of the run; None where there is none, or it cannot be read."""
    if not path.exists():
        return None
    try:
        return reader(path, *how)
    except HalfbyteError as error:
        run.problems.append(f"{path.name} cannot be read: {error.message}")
        return None


def _json(run: Run, path: Path, kind: type) -> Any:
    value = _read(run, path, read_json, CheckpointError)
    if value is None or isinstance(value, kind):
        return value
    run.problems.append(f"{path.name} cannot be read: it holds no {'list' if kind is list else 'object'}")
    return None


GENERATION = 64  # lines of completions.jsonl that a generation has at most


def _sampled(run: Run) -> list[Record]:
    """What completions.jsonl has of the first generation and of the last."""
    lines = (_read(run, run.path / "completions.jsonl", read_text, CheckpointError) or "").splitlines()
    try:
        first, last = (
            [parse_json(line, "completions.jsonl", CheckpointError) for line in some]
            for some in (lines[:GENERATION], lines[-GENERATION:])
        )
        begin, end = ({record["step"] for record in some} for some in (first[:1], last[-1:]))
        shown = [record for record in first if record["step"] in begin]
        return shown + [record for record in last if record["step"] in end - begin]
    except (HalfbyteError, KeyError, TypeError):
        run.problems.append("completions.jsonl has lines that cannot be read, and is left out")
        return []


def _metrics(run: Run) -> list[Record]:
    """The records of metrics.jsonl by step. A resumed run repeats steps after its checkpoint: the later line counts.

    A run killed while writing leaves half a line, which is skipped and named.
    """
    text = _read(run, run.path / "metrics.jsonl", read_text, CheckpointError) or ""
    records: dict[tuple[str, int], Record] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, "metrics.jsonl", CheckpointError, line=number)
            records[str(record["kind"]), int(record["step"])] = record
        except (HalfbyteError, ValueError, KeyError, TypeError):
            run.problems.append(f"metrics.jsonl line {number} cannot be read and is left out")
    return [record for _, record in sorted(records.items(), key=lambda each: each[0][1])]
