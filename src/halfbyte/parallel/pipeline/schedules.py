"""In which order the stages of a pipeline compute: torch's own schedules.

A model's layers are cut into stages, one or several a process; the micro-batches of a step go through them one behind
the other, forward and back. torch's schedules say in which order each process computes. Here they are read; `orders`
simulates them and gives them their messages, and `parallel.pipeline.partition` says where a model is cut.

What QLoRA changes. Zero-bubble schedules fill idle time with gradients of weights, which wait for nobody; here only
adapters have them, 3% of a forward, so `interleaved`, whose stages are short, is best. What waits for nobody here is
recomputation: with `ahead` a process recomputes while the gradient that it needs is on its way. docs/design.md has the
idle shares side by side; `tests/parallel/test_schedules.py` computes them.

Sources: 1F1B, Narayanan et al. 2019 (PipeDream); interleaved, Narayanan et al. 2021 (arXiv:2104.04473); zero bubble,
Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from ...utils.errors import ConfigError
from .simulation import Action, Orders


@dataclass(frozen=True)
class Schedule:
    """One of torch's schedules for so many processes.

    Attributes:
        name: as in `pipeline_schedule`.
        ranks: processes.
        chunks: stages of each.
    """

    name: str
    ranks: int
    chunks: int

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def orders(self, batches: int) -> Orders:
        """What each process computes for so many micro-batches.

        Raises:
            ConfigError: the schedule does not take so many.
        """
        try:
            return _torchs(self.name, self.ranks, self.chunks, batches)
        except ValueError as error:
            raise ConfigError(
                f"pipeline_schedule: {self.name} over {self.ranks} processes takes no step of {batches} micro-batches",
                f"set gradient_accumulation_steps to a multiple of {self.ranks}",
            ) from error

    def takes(self, batches: int) -> bool:
        """Whether it takes so many micro-batches."""
        try:
            self.orders(batches)
        except ConfigError:
            return False
        return True

    def at_least(self, batches: int) -> int:
        """The next number of micro-batches from `batches` on that the schedule takes."""
        while not self.takes(batches):
            batches += 1
        return batches

    def process_of(self, stage: int) -> int:
        """Which process has `stage`."""
        orders = self.orders(self.at_least(1))
        return next(rank for rank, order in enumerate(orders) if any(action.stage == stage for action in order))

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.process_of(stage) == rank]


@cache
def _torchs(name: str, ranks: int, chunks: int, batches: int) -> Orders:
    """torch's own lists (`pipeline_order`, torch 2.9 to 2.13), which it works out from a stage's place alone.

    Raises:
        ValueError: torch's, for a number of micro-batches that the schedule does not take.
    """
    from torch.distributed.pipelining import schedules

    # group_size and num_stages are what torch asks of a stage before it runs
    place: Any = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * chunks, submod=None)
    order: Any
    if name == "1f1b":
        order = schedules.Schedule1F1B(place, batches).pipeline_order
    else:
        kinds = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zb-1p": schedules.ScheduleInterleavedZeroBubble,
            "zb-v": schedules.ScheduleZBVZeroBubble,
        }
        order = kinds[name]([place] * chunks, batches).pipeline_order
    return tuple(
        _numbered((action.computation_type.value, action.stage_index) for action in order[rank] if action is not None)
        for rank in range(ranks)
    )


def _numbered(actions: Iterable[tuple[str, int]]) -> tuple[Action, ...]:
    """Each stage takes its micro-batches in order; torch 2.13 counts them from 1 in the last stage of 1f1b."""
    seen: Counter[tuple[str, int]] = Counter()
    numbered = []
    for kind, stage in actions:
        if kind in COMPUTES:
            numbered.append(Action(kind, stage, seen[kind, stage]))
            seen[kind, stage] += 1
    return tuple(numbered)


COMPUTES = ("F", "B", "I", "W")
