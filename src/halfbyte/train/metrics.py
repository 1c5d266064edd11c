"""The numbers of a run: metrics.jsonl, one JSON object per line, and the peak of memory.

A line is written whole and flushed at once, so a killed run leaves at most one torn line, which resuming drops together
with everything after the checkpoint it resumes from.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.reading import look, parse_json, read_text
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.files import write_text, writing

if TYPE_CHECKING:
    import torch

    from halfbyte.methods import Metric
    from halfbyte.parallel.mesh import Mesh

TOKENS = "tokens"  # the count of those that are processed, which padding is not among
SUM = "_sum"  # at the end of a sum's name in a checkpoint
Listener = Callable[[dict[str, Any]], None]


@dataclass
class Window:
    """Sums since the last training record; part of a checkpoint, because a record may span one.

    Attributes:
        sums: of a method's metrics, by name.
        counts: what they are divided by, and tokens, by name.
    """

    sums: dict[str, float]
    counts: dict[str, float]
    seconds: float = 0.0
    steps: int = 0

    @classmethod
    def of(cls, metrics: Sequence[Metric]) -> Window:
        """An empty one."""
        counts: dict[str, float] = dict.fromkeys([TOKENS, *(metric.over for metric in metrics)], 0)
        return cls({metric.name: 0.0 for metric in metrics}, counts)

    def add(self, sums: Mapping[str, float], counts: Mapping[str, float], seconds: float) -> None:
        """Take in a step."""
        for mine, theirs in ((self.sums, sums), (self.counts, counts)):
            for name in mine:
                mine[name] += theirs[name]
        self.seconds += seconds
        self.steps += 1

    def over(self, mesh: Mesh) -> Window:
        """The sums over all processes' tokens, and the counts of their rows, which are of whole rows."""
        from halfbyte.parallel.mesh import TOKEN_AXES

        return replace(self, sums=mesh.sum(self.sums, TOKEN_AXES), counts=mesh.sum(self.counts))

    def means(self, metrics: Sequence[Metric]) -> dict[str, float]:
        """Return each metric's sum over its count, and of those without a count the first alone, the loss: a step in
        which no answer ended has the loss 0."""
        return {
            m.name: self.sums[m.name] / (self.counts[m.over] or 1)
            for m in metrics
            if self.counts[m.over] or m is metrics[0]
        }

    def totals(self) -> dict[str, float]:
        """Counts of the window, and means per step and second."""
        times = {"step_seconds": self.seconds / self.steps, "tokens_per_second": self.counts[TOKENS] / self.seconds}
        return self.counts | times

    def as_dict(self) -> dict[str, float]:
        sums = {f"{name}{SUM}": value for name, value in self.sums.items()}
        return {**sums, **self.counts, "seconds": self.seconds, "steps": self.steps}

    @classmethod
    def of_dict(cls, state: Mapping[str, float]) -> Window:
        """The window that `as_dict` describes."""
        rest = dict(state)
        seconds, steps = rest.pop("seconds"), int(rest.pop("steps"))
        sums = {name.removesuffix(SUM): rest.pop(name) for name in state if name.endswith(SUM)}
        return cls(sums, rest, seconds, steps)


class MetricsFile:
    """`metrics.jsonl` of a run, and whoever listens to its records (the terminal)."""

    def __init__(self, path: Path, listeners: tuple[Listener, ...] = ()):
        self.path, self.listeners = path, list(listeners)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and tell the listeners.

        Raises:
            TrainingError: the disk is full.
        """
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
        for listener in self.listeners:
            listener(record)

    def records(self) -> list[dict[str, Any]]:
        """All whole records, in order; a torn last line is left out.

        Raises:
            ConfigError: it is not what a run wrote.
        """
        fix = "remove it, or choose another output_dir"
        kind = look(self.path, ConfigError, fix)
        if kind == "folder":
            raise ConfigError(f"{self.path} is a folder", fix)
        if not kind:
            return []
        *lines, _ = read_text(self.path, ConfigError, fix).split("\n")
        where, found = str(self.path), []
        for number, line in enumerate(lines, 1):
            record = parse_json(line, where, ConfigError, fix, line=number)
            if not _is_record(record):
                raise ConfigError(f"{where}:{number} is no record of a run", fix)
            found.append(record)
        return found

    def keep_until(self, step: int) -> None:
        """Drop the records past `step`, atomically: the resumed run writes them again."""
        kept = [json.dumps(record) + "\n" for record in self.records() if record["step"] <= step]
        write_text(self.path, "".join(kept))


def _is_record(found: Any) -> bool:
    """Whether a line holds what every record does, and one of training what a run's summary is made of."""
    if not isinstance(found, dict) or "kind" not in found or type(found.get("step")) is not int:
        return False
    loss, tokens, rate = (found.get(name) for name in ("loss", TOKENS, "tokens_per_second"))
    numbers = all(isinstance(number, int | float) for number in (loss, tokens, rate))
    return found["kind"] != "train" or (numbers and rate > 0)  # type: ignore[operator]


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: by torch's allocator on an accelerator, by the whole process on a CPU."""
    import torch

    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def reserved_memory(device: torch.device) -> dict[str, int]:
    """The most that torch's allocator took of an accelerator, cached memory and the pools of graphs among it."""
    import torch

    if device.type not in ("cuda", "xpu"):
        return {}
    return {"reserved_bytes": torch.get_device_module(device).max_memory_reserved(device)}


def restart_peak(device: torch.device) -> None:
    """Count the peak from here on; a process's peak on a CPU cannot be taken back."""
    import torch

    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def memory_now(device: torch.device) -> int:
    """Bytes held now, counted as `peak_memory` does."""
    import psutil
    import torch

    if device.type in ("cuda", "xpu"):
        return torch.get_device_module(device).memory_allocated(device)
    return psutil.Process().memory_info().rss
