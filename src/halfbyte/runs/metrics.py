"""The records of a run: metrics.jsonl, one JSON object per line. Imports no torch.

Each line is written and flushed at once, so a killed run leaves at most one incomplete line. Resuming drops it, and all
records after the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..methods.base import TOKENS
from ..reading import look, parse_json, read_text
from ..utils.errors import ConfigError
from ..utils.files import write_text, writing

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh
    from ..methods import Metric

SUM = "_sum"  # suffix of a sum's name in a checkpoint
Listener = Callable[[dict[str, Any]], None]


@dataclass
class Window:
    """Sums since the last training record; part of a checkpoint, because a record may span one.

    Attributes:
        sums: sums of a method's metrics, by name.
        counts: their divisors, and tokens, by name.
    """

    sums: dict[str, float]
    counts: dict[str, float]
    seconds: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, metrics: Sequence[Metric]) -> Window:
        """Return an empty window."""
        counts: dict[str, float] = dict.fromkeys([TOKENS, *(metric.over for metric in metrics)], 0)
        return cls({metric.name: 0.0 for metric in metrics}, counts)

    def add(self, sums: Mapping[str, float], counts: Mapping[str, float], seconds: float) -> None:
        """Add a step."""
        for totals, added in ((self.sums, sums), (self.counts, counts)):
            for name in totals:
                totals[name] += added[name]
        self.seconds += seconds
        self.steps += 1

    def over(self, mesh: Mesh) -> Window:
        """Return the window of all ranks. Sums are per shard of a row, counts per full row, so their axes differ."""
        from ..mesh.mesh import TOKEN_AXES as TOKEN_AXES

        return replace(self, sums=mesh.sum(self.sums, TOKEN_AXES), counts=mesh.sum(self.counts))

    def means(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """Return each metric's sum divided by its count. Metrics with a count of 0 are left out, except the first, the
        loss, which is then 0: a step in which no answer ended."""
        return {
            m.name: self.sums[m.name] / (self.counts[m.over] or 1)
            for m in metrics
            if self.counts[m.over] or m is metrics[0]
        }

    def totals(self) -> dict[str, float]:
        """Return the counts, seconds per step and tokens per second of the window."""
        times = {"step_seconds": self.seconds / self.steps, "tokens_per_second": self.counts[TOKENS] / self.seconds}
        return self.counts | times

    def as_dict(self) -> dict[str, float]:
        sums = {f"{name}{SUM}": value for name, value in self.sums.items()}
        return {**sums, **self.counts, "seconds": self.seconds, "steps": self.steps}

    @classmethod
    def of_dict(cls, state: Mapping[str, float]) -> Window:
        """Return the window that `as_dict` stored."""
        counts = dict(state)
        seconds, steps = counts.pop("seconds"), int(counts.pop("steps"))
        sums = {name.removesuffix(SUM): counts.pop(name) for name in state if name.endswith(SUM)}
        return cls(sums, counts, seconds, steps)


def last_records(trained: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last tenth of the training records, at least one: a single step's loss is too noisy."""
    return list(trained[-max(1, len(trained) // 10) :])


def final_loss(trained: Sequence[dict[str, Any]], over: str) -> float | None:
    """Return the mean loss of `last_records`; None without records.

    Args:
        over: the count by which the method weights losses, such as trained tokens.
    """
    records = last_records(trained)
    weights = [record.get(over) or 1 for record in records]
    if not records:
        return None
    return sum(record["loss"] * weight for record, weight in zip(records, weights, strict=True)) / sum(weights)


class MetricsFile:
    """`metrics.jsonl` of a run, and the listeners to its records, such as the terminal."""

    def __init__(self, path: Path, listeners: tuple[Listener, ...] = ()):
        self.path, self.listeners = path, list(listeners)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and call the listeners.

        Raises:
            TrainingError: the disk is full.
        """
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        for listener in self.listeners:
            listener(record)

    def records(self) -> list[dict[str, Any]]:
        """Return all records, in order, without an incomplete last line.

        Raises:
            ConfigError: the file was not written by a run.
        """
        fix = "remove it, or choose another output_dir"
        file_type = look(self.path, ConfigError, fix)
        if file_type == "folder":
            raise ConfigError(f"{self.path} is a folder", fix)
        if not file_type:
            return []
        *lines, _ = read_text(self.path, ConfigError, fix).split("\n")
        records = []
        for number, line in enumerate(lines, 1):
            record = parse_json(line, str(self.path), ConfigError, fix, line=number)
            if not _is_record(record):
                raise ConfigError(f"{self.path}:{number} is not a record of a run", fix)
            records.append(record)
        return records

    def keep_until(self, step: int) -> None:
        """Drop the records after `step`, atomically; the resumed run writes them again."""
        lines = [json.dumps(record) + "\n" for record in self.records() if record["step"] <= step]
        write_text(self.path, "".join(lines))


def evaluation_of_weights(evaluations: Sequence[dict[str, Any]], best: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the evaluation of a run's saved weights: the last one, or the best one if the run ended with its weights.

    Args:
        best: entry of environment.json; None: evaluations were not compared.
    """
    loaded = best["step"] if best is not None and best["loaded"] else None
    return next((record for record in reversed(evaluations) if record["step"] == loaded), evaluations[-1])


def describe_best(best: Mapping[str, Any]) -> str:
    """Describe the best evaluation, an entry of environment.json, in a line."""
    stopped = best["stopped"]
    end = "" if stopped is None else f"training stopped after step {stopped}, since no evaluation was better; "
    weights = "the saved weights are of that step" if best["loaded"] else "the saved weights are of the last step"
    return f"{end}best evaluation: {best['metric']} {best['value']:.5g} after step {best['step']}; {weights}"


def _is_record(record: Any) -> bool:
    """Return whether `record` has the keys of every record, and if it is a training record, the keys of a summary."""
    if not isinstance(record, dict) or "kind" not in record or type(record.get("step")) is not int:
        return False
    loss, tokens, rate = (record.get(name) for name in ("loss", TOKENS, "tokens_per_second"))
    numbers = all(isinstance(number, int | float) for number in (loss, tokens, rate))
    return record["kind"] != "train" or (numbers and rate > 0)  # type: ignore[operator]
