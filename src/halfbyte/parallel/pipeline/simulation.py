"""Orders in which the stages of a pipeline compute: how long they take, and what messages they need. Arithmetic alone.

`parallel.pipeline.schedules` has torch's own orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """Something a process does for one micro-batch: in `Orders` it computes, in a program it may send, too.

    Attributes:
        kind: "F" forward; "B" the whole backward; "I" backward without the gradients of weights, and "W" those;
            "send F" and "receive F" of what `stage` gives or takes in forward, "send B" and "receive B" of gradients.
    """

    kind: str
    stage: int
    batch: int


Orders = tuple[tuple[Action, ...], ...]  # of each process


@dataclass(frozen=True)
class Seconds:
    """How long one micro-batch takes in a stage, in any unit.

    Attributes:
        again: of `backward`, what runs the forward again, and so needs no gradient yet.
        weights: the gradients of weights alone; they come on top of `backward`.
    """

    forward: float
    backward: float
    again: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Simulation:
    """What becomes of a schedule.

    Attributes:
        seconds: until the last process is ready.
        idle: share of all processes' time in which they wait.
        ends: (second, process, action), in the order in which they end.
        held: of each process: most micro-batches in a stage, summed over its stages, that wait for their backward.
    """

    seconds: float
    idle: float
    ends: tuple[tuple[float, int, Action], ...]
    held: tuple[int, ...]


def simulate(orders: Orders, seconds: Sequence[Seconds], *, ahead: bool = False) -> Simulation:
    """The times at which processes end what `orders` say.

    Args:
        seconds: of each stage.
        ahead: recompute before the gradient is there.
    """
    ends: dict[Action, float] = {}
    free, done = [0.0] * len(orders), [0] * len(orders)
    timed: list[tuple[float, int, Action]] = []
    while any(at < len(order) for at, order in zip(done, orders, strict=True)):
        before = sum(done)
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = order[done[rank]]
                needed = _needed(action, len(seconds), ends)
                if needed is None:
                    break
                free[rank] = ends[_known_as(action)] = _end(action, seconds[action.stage], free[rank], needed, ahead)
                timed.append((free[rank], rank, action))
                done[rank] += 1
        assert sum(done) > before, "each process waits for another"
    timed.sort(key=lambda each: (each[0], each[1], orders[each[1]].index(each[2])))
    last, worked = max(free), sum(_work(action, seconds[action.stage]) for order in orders for action in order)
    return Simulation(last, 1 - worked / (last * len(orders)), tuple(timed), tuple(map(_held, orders)))


def _owners(orders: Orders) -> dict[int, int]:
    return {action.stage: rank for rank, order in enumerate(orders) for action in order}


def _known_as(action: Action) -> Action:
    """A backward without the gradients of weights is what the stage before waits for, as is a whole one."""
    return action._replace(kind="B") if action.kind == "I" else action


def _needed(action: Action, stages: int, ends: dict[Action, float]) -> float | None:
    """When what `action` takes from another stage is there; None: not known yet."""
    from_stage = action.stage + (-1 if action.kind == "F" else 1)
    if action.kind == "W" or not 0 <= from_stage < stages:
        return 0.0
    return ends.get(Action("F" if action.kind == "F" else "B", from_stage, action.batch))


def _end(action: Action, seconds: Seconds, free: float, needed: float, ahead: bool) -> float:
    if ahead and action.kind in ("B", "I"):
        return max(free + seconds.again, needed) + _work(action, seconds) - seconds.again
    return max(free, needed) + _work(action, seconds)


def _work(action: Action, seconds: Seconds) -> float:
    return {
        "F": seconds.forward,
        "B": seconds.backward + seconds.weights,
        "I": seconds.backward,
        "W": seconds.weights,
    }[action.kind]


def _held(order: Sequence[Action]) -> int:
    most = held = 0
    for action in order:
        held += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
        most = max(most, held)
    return most


# --- what a process does, with its messages --------------------------------------------------------------------------


def programs(orders: Orders, seconds: Sequence[Seconds], *, ahead: bool = False) -> Orders:
    """`orders` with sends and receives.

    All messages have one order, that in which the simulation has them, and each process takes part in its own in that
    order: so none waits for another in a circle, whatever else a message has to wait for. NCCL's go through one queue
    for both directions of a pair, which costs no time: where what b takes from a stands behind what b sends to a, b has
    computed that before, in all cases. A receive stands where its message is sent, before what its process is then at:
    it holds up no message, and where seconds are as planned its kernel waits on the device for less than an action.
    """
    owner, stages = _owners(orders), len(seconds)
    found: list[list[Action]] = [[] for _ in orders]
    for _, rank, action in simulate(orders, seconds, ahead=ahead).ends:
        found[rank].append(action)
        way = "F" if action.kind == "F" else "B"
        to_stage = action.stage + (1 if way == "F" else -1)
        if action.kind == "W" or not 0 <= to_stage < stages or owner[to_stage] == rank:
            continue
        found[rank].append(action._replace(kind=f"send {way}"))
        found[owner[to_stage]].append(Action(f"receive {way}", to_stage, action.batch))
    return tuple(map(tuple, found))
