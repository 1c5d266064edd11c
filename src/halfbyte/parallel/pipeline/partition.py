"""Pipeline partition: the schedule, and the layers of each stage, chosen by the seconds of layers and head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ...utils.errors import ConfigError
from .schedules import Schedule, Seconds, simulate

MAX_CHUNKS = 4  # stages per rank of interleaved; with more, messages would take long compared to a stage
CHUNKS_PER_RANK: dict[
    str, Callable[[int], Sequence[int]]
] = {  # name → stages per rank, best first, for layers per rank
    "1f1b": lambda layers: [1],
    "interleaved": lambda layers: range(min(MAX_CHUNKS, layers), 1, -1),
    "zb-1p": lambda layers: [2] if layers > 1 else [],
    "zb-v": lambda layers: [2] if layers > 1 else [],
}


def choose_schedule(
    name: str, ranks: int, layers: Sequence[Seconds], head: Seconds, batches: int
) -> tuple[Schedule, list[range]]:
    """Return the schedule of a run and the layers of each stage.

    Args:
        name: the key `pipeline_schedule`; "auto" simulates 1f1b and interleaved, with `ahead`, and takes the faster.
        layers: of each decoder layer; the embedding takes no time.
        head: of head and loss, after the last layer.
        batches: micro-batches per step.

    Raises:
        ConfigError: there are fewer layers than stages, or the schedule does not support this number of micro-batches.
    """
    if len(layers) < ranks:
        raise ConfigError(
            f"parallel: {ranks} pipeline stages need as many decoder layers, and the model has {len(layers)}",
            f"set pipeline to {len(layers)} or less",
        )
    names = ["1f1b", "interleaved"] if name == "auto" else [name]
    per_rank = len(layers) // ranks
    schedules = [Schedule(n, ranks, chunks) for n in names for chunks in CHUNKS_PER_RANK[n](per_rank)]
    if not schedules:
        raise ConfigError(
            f"pipeline_schedule: {name} needs 2 stages or more per process, and there are {len(layers)} decoder"
            f" layers for {ranks} processes",
            "set pipeline_schedule: 1f1b, or a smaller pipeline",
        )
    timed: list[tuple[float, Schedule, list[range]]] = []
    for schedule in schedules:
        if schedule is schedules[-1] and not timed:
            schedule.actions(batches)  # raises the error
        if schedule.accepts(batches):
            cut = partition_layers(schedule, layers, head)
            stages = stage_seconds(cut, layers, head)
            timed.append((simulate(schedule.actions(batches), stages, ahead=True).seconds, schedule, cut))
    _, schedule, cut = min(timed, key=lambda candidate: candidate[0])
    return schedule, cut


def stage_seconds(stage_layers: Sequence[range], layers: Sequence[Seconds], head: Seconds) -> list[Seconds]:
    """Return the seconds of every stage: its layers, and in the last stage, which may have no layer, the head."""
    seconds = [sum((layers[index] for index in layer_range), Seconds(0.0, 0.0)) for layer_range in stage_layers]
    return [*seconds[:-1], seconds[-1] + head]


def partition_layers(schedule: Schedule, layers: Sequence[Seconds], head: Seconds) -> list[range]:
    """Return the layers of each stage that minimize the load of the busiest rank, then the differences of stages.

    Every stage has a layer, except that with several stages per rank the last stage may be the head only.
    """
    stages, totals = schedule.stages, [layer.total for layer in layers]
    owner = [schedule.rank_of(stage) for stage in range(stages)]
    minima = [1] * (stages - 1) + [0 if schedule.chunks > 1 and head.total else 1]

    def cost(bounds: Sequence[int]) -> tuple[float, float]:
        sums, busy = [], [0.0] * schedule.ranks
        for stage in range(stages):
            seconds = sum(totals[bounds[stage] : bounds[stage + 1]]) + (head.total if stage == stages - 1 else 0.0)
            sums.append(seconds)
            busy[owner[stage]] += seconds
        return round(max(busy), 9), round(sum(n * n for n in sums), 9)

    bounds = [round(stage * len(layers) / stages) for stage in range(stages + 1)]
    best = cost(bounds)
    improved = True
    while improved:
        improved = False
        for moved in _moves(bounds, minima):
            if (moved_cost := cost(moved)) < best:
                bounds = moved
                best = moved_cost
                improved = True
                break
    return [range(begin, end) for begin, end in pairwise(bounds)]


def _moves(bounds: list[int], minima: Sequence[int]) -> Iterator[list[int]]:
    """Yield `bounds` with a run of neighbours moved by one layer, if every stage keeps its minimum."""
    inner = len(bounds) - 1
    for begin in range(1, inner):
        for end in range(begin + 1, inner + 1):
            for by in (-1, 1):
                moved = [*bounds[:begin], *(bound + by for bound in bounds[begin:end]), *bounds[end:]]
                if all(end - begin >= size for (begin, end), size in zip(pairwise(moved), minima, strict=True)):
                    yield moved
