"""The files of a run directory, and the figures derived from them.

Any file may be missing (a run that was stopped, an older version): its value is then None or empty. A file that is
there but cannot be read is treated as missing and named in `problems`, which the report shows.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from ..methods import METHODS, Numbers

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
    merge: dict[str, Any] | None = None
    merges: list[dict[str, Any]] = field(default_factory=list)  # each target's, merge.json among them
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
    if config.exists():
        run.config_text = config.read_text(encoding="utf-8", errors="replace")
        try:
            run.config = yaml.safe_load(run.config_text) or {}
        except yaml.YAMLError as error:
            run.problems.append(f"config.resolved.yaml cannot be read: {error}")
    for name, file in (
        ("memory", "memory.json"),
        ("data", "data_report.json"),
        ("generations", "generations.json"),
        ("environment", "environment.json"),
        ("checks", "checks.json"),
        ("merge", "merge.json"),
    ):
        setattr(run, name, _json(run, file))
    others = (_json(run, path.name) for path in sorted(run.path.glob("merge-*.json")))
    run.merges = [each for each in (run.merge, *others) if isinstance(each, dict)]
    if stopped := (run.environment or {}).get("stopped"):
        run.problems.append(f"the run was not finished: {stopped}")
    records = _metrics(run)
    run.train = [record for record in records if record["kind"] == "train"]
    run.evals = [record for record in records if record["kind"] == "eval"]
    return run


def _json(run: Run, file: str) -> Any:
    path = run.path / file
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        run.problems.append(f"{file} cannot be read: {error}")
        return None


def _metrics(run: Run) -> list[Record]:
    """The records of metrics.jsonl by step. A resumed run repeats steps after its checkpoint: the later line counts.

    A run killed while writing leaves half a line, which is skipped and named.
    """
    path = run.path / "metrics.jsonl"
    if not path.exists():
        return []
    records: dict[tuple[str, int], Record] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            records[record["kind"], record["step"]] = record
        except (ValueError, KeyError, TypeError):
            run.problems.append(f"metrics.jsonl line {number} cannot be read and is left out")
    return sorted(records.values(), key=lambda record: record["step"])
