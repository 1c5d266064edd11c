"""Pipeline schedules of torch, their simulation, and the messages that they need.

A model is partitioned into stages, one or several per rank, and the micro-batches of a step go through them forward and
back. A schedule is the order in which each rank computes. `parallel.pipeline.partition` chooses one and assigns layers.

QLoRA changes which schedule is best. Zero-bubble schedules fill idle time with gradients of weights, which need no
message. Here only adapters have such gradients, 3% of a forward, so `interleaved`, with its short stages, is best.
Recomputation needs no message either: with `ahead` a rank recomputes while the gradient it needs is in flight.
docs/design/parallelism.md compares idle shares; `tests/parallel/test_schedules.py` computes them.

Sources: 1F1B, Narayanan et al. 2019 (PipeDream); interleaved, Narayanan et al. 2021 (arXiv:2104.04473); zero bubble,
Qi et al. 2023 (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...utils.errors import ConfigError


class Action(NamedTuple):
    """Computation or message of one rank for one micro-batch.

    Attributes:
        operation: "F" forward; "B" full backward; "I" backward without gradients of weights, and "W" those gradients;
            "send F" and "receive F" of `stage`'s output and input in forward, "send B" and "receive B" of gradients.
    """

    operation: str
    stage: int
    batch: int


COMPUTE_KINDS = ("F", "B", "I", "W")
RankActions = tuple[tuple[Action, ...], ...]  # the actions of each rank, in order


@dataclass(frozen=True)
class Schedule:
    """A schedule of torch for a number of ranks.

    Attributes:
        name: as in `pipeline_schedule`.
        ranks: pipeline degree.
        chunks: stages per rank.
    """

    name: str
    ranks: int
    chunks: int

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def actions(self, batches: int) -> RankActions:
        """Return what each rank computes for `batches` micro-batches, in order.

        Raises:
            ConfigError: the schedule does not support this number of micro-batches.
        """
        try:
            return _torch_actions(self.name, self.ranks, self.chunks, batches)
        except ValueError as error:
            problem = (
                f"pipeline_schedule: {self.name} over {self.ranks} processes does not support {batches} micro-batches"
            )
            fix = f"set gradient_accumulation_steps to a multiple of {self.ranks}"
            raise ConfigError(problem, fix) from error

    def accepts(self, batches: int) -> bool:
        """Return whether the schedule supports `batches` micro-batches."""
        try:
            self.actions(batches)
        except ConfigError:
            return False
        return True

    def next_accepted(self, batches: int) -> int:
        """Return the smallest supported number of micro-batches from `batches` on."""
        while not self.accepts(batches):
            batches += 1
        return batches

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds `stage`."""
        actions = self.actions(self.next_accepted(1))
        return next(rank for rank, order in enumerate(actions) if any(action.stage == stage for action in order))

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]


@cache
def _torch_actions(name: str, ranks: int, chunks: int, batches: int) -> RankActions:
    """Return torch's own lists (`pipeline_order`, torch 2.9 to 2.13), which depend on the stages' indices only.

    Raises:
        ValueError: torch's, for an unsupported number of micro-batches.
    """
    from torch.distributed.pipelining import schedules

    # the only attributes of a stage that torch reads before it runs
    stage: Any = SimpleNamespace(group_rank=0, group_size=ranks, num_stages=ranks * chunks, submod=None)
    order: Any
    if name == "1f1b":
        order = schedules.Schedule1F1B(stage, batches).pipeline_order
    else:
        classes = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zb-1p": schedules.ScheduleInterleavedZeroBubble,
            "zb-v": schedules.ScheduleZBVZeroBubble,
        }
        order = classes[name]([stage] * chunks, batches).pipeline_order
    return tuple(
        _number_batches(
            (action.computation_type.value, action.stage_index) for action in order[rank] if action is not None
        )
        for rank in range(ranks)
    )


def _number_batches(actions: Iterable[tuple[str, int]]) -> tuple[Action, ...]:
    """Number each stage's micro-batches in order; torch 2.13 counts from 1 in the last stage of 1f1b."""
    seen: Counter[tuple[str, int]] = Counter()
    numbered = []
    for operation, stage in actions:
        if operation in COMPUTE_KINDS:
            numbered.append(Action(operation, stage, seen[operation, stage]))
            seen[operation, stage] += 1
    return tuple(numbered)


# --- simulation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seconds:
    """Time of one micro-batch in a stage, in any unit.

    Attributes:
        backward: includes `recompute`, excludes `weights`.
        recompute: recomputation of the forward, which needs no gradient.
        weights: gradients of weights.
    """

    forward: float
    backward: float
    recompute: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights

    def __add__(self, added: Seconds) -> Seconds:
        return Seconds(*(a + b for a, b in zip(astuple(self), astuple(added), strict=True)))


@dataclass(frozen=True)
class Simulation:
    """Simulated run of a schedule.

    Attributes:
        seconds: end of the last rank.
        idle: idle share of all ranks' time.
        ends: (second, rank, action), sorted by second.
        in_flight: for each rank, the maximum number of micro-batches between forward and backward, summed over stages.
    """

    seconds: float
    idle: float
    ends: tuple[tuple[float, int, Action], ...]
    in_flight: tuple[int, ...]


def simulate(actions: RankActions, seconds: Sequence[Seconds], *, ahead: bool = False) -> Simulation:
    """Simulate the ranks' `actions`, with instant messages.

    Args:
        seconds: of each stage.
        ahead: recompute before the gradient arrives.
    """
    ends: dict[Action, float] = {}
    free = [0.0] * len(actions)  # second from which each rank is free
    done = [0] * len(actions)  # actions of each rank that are simulated
    timed: list[tuple[float, int, Action]] = []
    while any(at < len(order) for at, order in zip(done, actions, strict=True)):
        previous = sum(done)
        for rank, order in enumerate(actions):
            while done[rank] < len(order):
                action = order[done[rank]]
                ready = _input_ready(action, len(seconds), ends)
                if ready is None:
                    break
                free[rank] = _end(action, seconds[action.stage], free[rank], ready, ahead)
                # "I" stands for "B", since the previous stage depends on either in the same way
                ends[action._replace(operation="B") if action.operation == "I" else action] = free[rank]
                timed.append((free[rank], rank, action))
                done[rank] += 1
        assert sum(done) > previous, "deadlock: every rank needs the result of another"
    timed.sort(key=lambda end: (end[0], end[1], actions[end[1]].index(end[2])))
    last, worked = max(free), sum(_work(action, seconds[action.stage]) for order in actions for action in order)
    changes = {"F": 1, "B": -1, "I": -1, "W": 0}  # of the micro-batches between forward and backward
    in_flight = (accumulate(changes[action.operation] for action in order) for order in actions)
    return Simulation(
        last, 1 - worked / (last * len(actions)), tuple(timed), tuple(max(counts, default=0) for counts in in_flight)
    )


def _input_ready(action: Action, stages: int, ends: dict[Action, float]) -> float | None:
    """Return when the action's input from another stage is ready; None: not computed yet."""
    from_stage = action.stage + (-1 if action.operation == "F" else 1)
    if action.operation == "W" or not 0 <= from_stage < stages:
        return 0.0
    return ends.get(Action("F" if action.operation == "F" else "B", from_stage, action.batch))


def _end(action: Action, seconds: Seconds, free: float, ready: float, ahead: bool) -> float:
    if ahead and action.operation in ("B", "I"):
        return max(free + seconds.recompute, ready) + _work(action, seconds) - seconds.recompute
    return max(free, ready) + _work(action, seconds)


def _work(action: Action, seconds: Seconds) -> float:
    return {
        "F": seconds.forward,
        "B": seconds.backward + seconds.weights,
        "I": seconds.backward,
        "W": seconds.weights,
    }[action.operation]


# --- messages ---------------------------------------------------------------------------------------------------------


def add_messages(actions: RankActions, seconds: Sequence[Seconds], *, ahead: bool = False) -> RankActions:
    """Insert sends and receives into `actions`.

    All messages have one global order, by simulated time, and every rank takes part in its messages in that order, so
    there is no deadlock. NCCL queues both directions of a pair of ranks together, which costs no time: if a receive of
    rank b from a follows a send of b to a in the queue, b has computed the sent tensor before in any case. A receive is
    issued when its message is sent, before the rank's next action: it delays no message, and if the `seconds` are right
    its kernel blocks on the device for less than one action.
    """
    owner = {action.stage: rank for rank, order in enumerate(actions) for action in order}
    stages = len(seconds)
    with_messages: list[list[Action]] = [[] for _ in actions]
    for _, rank, action in simulate(actions, seconds, ahead=ahead).ends:
        with_messages[rank].append(action)
        direction = "F" if action.operation == "F" else "B"
        to_stage = action.stage + (1 if direction == "F" else -1)
        if action.operation == "W" or not 0 <= to_stage < stages or owner[to_stage] == rank:
            continue
        with_messages[rank].append(action._replace(operation=f"send {direction}"))
        with_messages[owner[to_stage]].append(Action(f"receive {direction}", to_stage, action.batch))
    return tuple(map(tuple, with_messages))
