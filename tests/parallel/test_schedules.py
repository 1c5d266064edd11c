"""torch's schedules and their simulation."""

from itertools import pairwise
from random import Random

import pytest

from halfbyte.parallel.pipeline.partition import choose_schedule, partition_layers, stage_seconds
from halfbyte.parallel.pipeline.schedules import Action, Schedule, Seconds, add_messages, simulate
from halfbyte.utils.errors import ConfigError

KINDS = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("zb-1p", 2))
LAYER, HEAD = Seconds(1, 2, recompute=1, weights=0.03), Seconds(4.8, 0)
# Seconds of a stage, whether it recomputes ahead → idle percent of `KINDS`, 4 processes and 16 micro-batches
TABLE = {
    "everything trained": (Seconds(1, 1, weights=1), False, (15.8, 8.6, 4.5, 3.0, 3.0)),
    "kept": (Seconds(1, 1, weights=0.03), False, (15.8, 8.6, 4.5, 8.2, 8.3)),
    "recomputed": (LAYER, False, (15.8, 8.6, 4.5, 10.9, 8.4)),
    "recomputed ahead": (LAYER, True, (11.2, 5.9, 3.0, 5.7, 5.7)),
}


def idle(name, chunks, seconds, ahead, ranks=4, batches=16):
    schedule = Schedule(name, ranks, chunks)
    return 100 * simulate(schedule.actions(batches), [seconds] * schedule.stages, ahead=ahead).idle


@pytest.mark.parametrize("row", TABLE)
def test_idle_time_of_torchs_schedules(row):
    seconds, ahead, expected = TABLE[row]
    assert [round(idle(name, chunks, seconds, ahead), 1) for name, chunks in KINDS] == list(expected)


def test_idle_share_of_1f1b_is_the_formula():
    """(p - 1) / (m + p - 1), whatever a stage's seconds; recomputing ahead shortens the drain only."""
    for ranks, batches in ((2, 8), (4, 16), (8, 8)):
        expected = 100 * (ranks - 1) / (batches + ranks - 1)
        assert idle("1f1b", 1, Seconds(3, 7), False, ranks, batches) == pytest.approx(expected)
        assert idle("1f1b", 1, LAYER, True, ranks, batches) < expected


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8)])
def test_every_stage_computes_every_micro_batch_once(name, chunks, ranks, batches):
    schedule = Schedule(name, ranks, chunks)
    orders = schedule.actions(batches)
    done = [action for order in orders for action in order]
    each = [(stage, batch) for stage in range(schedule.stages) for batch in range(batches)]
    assert sorted((a.stage, a.batch) for a in done if a.operation == "F") == each
    assert sorted((a.stage, a.batch) for a in done if a.operation in "BI") == each
    assert sorted(a.stage for rank in range(ranks) for a in set(orders[rank])) == sorted(a.stage for a in done)
    assert sorted(stage for rank in range(ranks) for stage in schedule.stages_of(rank)) == list(range(schedule.stages))


def some_seconds(random, schedule):
    """Return random seconds of stages, which differ by up to a factor of six."""
    return [Seconds(random.uniform(0.5, 3), backward := random.uniform(0.5, 3), recompute=backward / 2)
            for _ in range(schedule.stages)]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_do_not_deadlock(name, chunks, ranks):
    """Each rank runs its actions in order, and a send blocks until its receive starts: all ranks finish.

    This holds with fewer dependencies too: NCCL may create a communicator at a message, CUDA may load a kernel, or
    memory may be freed meanwhile.
    """
    random, schedule = Random(ranks), Schedule(name, ranks, chunks)
    between = sum(one != other for one, other in pairwise(owners(schedule)))
    for ahead in (False, True) * 3:
        programs_ = add_messages(schedule.actions(2 * ranks), some_seconds(random, schedule), ahead=ahead)
        lines = [[action for action in line if " " in action.operation] for line in programs_]
        assert sum(map(len, lines)) == 2 * 2 * 2 * ranks * between
        while any(lines):
            heads = [line[0] for line in lines if line]
            met = next((each for each in heads if each.operation.startswith("send") and taker(each) in heads), None)
            assert met, lines
            for line in lines:
                if line and line[0] in (met, taker(met)):
                    line.pop(0)


def taker(send):
    """Return the receive of a send."""
    way = send.operation[-1]
    return Action(f"receive {way}", send.stage + (1 if way == "F" else -1), send.batch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_queue_of_a_pair_costs_no_time(name, chunks, ranks):
    """The messages of a pair of ranks share a queue in the order of their start, as in NCCL.

    A message is exchanged when both ranks have reached it, and only computations that need its tensor wait. However far
    the seconds are from those the messages were ordered by, the step takes as long as with instant messages.
    """
    random, schedule = Random(ranks), Schedule(name, ranks, chunks)
    orders = schedule.actions(2 * ranks)
    for ahead in (False, True) * 3:
        lines = add_messages(orders, some_seconds(random, schedule), ahead=ahead)
        actual = some_seconds(random, schedule)
        assert step_seconds(lines, actual, owners(schedule), ahead) == simulate(orders, actual, ahead=ahead).seconds


def step_seconds(lines, seconds, owner, ahead):
    """Return the seconds of a step in which the messages of a pair share a queue."""
    clock, at, here, queues, free = [0.0] * len(lines), [0] * len(lines), {}, {}, {}

    def do(rank, action):
        """Run the action if its input is ready; returns whether it is."""
        kind, _, way = action.operation.partition(" ")
        if way:
            message = taker(action) if kind == "send" else action
            ends = frozenset((owner[message.stage], owner[message.stage + (-1 if way == "F" else 1)]))
            queues.setdefault(ends, {each: [] for each in ends})[rank].append((clock[rank], message))
            return True
        of, from_stage = seconds[action.stage], action.stage + (-1 if kind == "F" else 1)
        needed = 0.0
        if kind != "W" and 0 <= from_stage < len(seconds) and owner[from_stage] != rank:
            needed = here.get(action._replace(operation=f"receive {'F' if kind == 'F' else 'B'}"))
        if needed is None:
            return False
        recompute = of.recompute if ahead and kind in "BI" else 0.0
        work = {"F": of.forward, "B": of.backward + of.weights, "I": of.backward, "W": of.weights}[kind]
        clock[rank] = max(clock[rank] + recompute, needed) + work - recompute
        return True

    while any(done < len(line) for done, line in zip(at, lines, strict=True)):
        before = list(at)
        for rank, line in enumerate(lines):
            while at[rank] < len(line) and do(rank, line[at[rank]]):
                at[rank] += 1
        for ends, queue in queues.items():
            one, other = queue.values()
            while one and other:
                (begun, message), (also, same) = one.pop(0), other.pop(0)
                assert message == same
                here[message] = free[ends] = max(begun, also, free.get(ends, 0.0))
        assert at != before, "each process waits for another"
    return max(clock)


def owners(schedule):
    return [schedule.rank_of(stage) for stage in range(schedule.stages)]


def test_layers_are_partitioned_by_seconds():
    """Head and loss of an 8B model take as long as several layers, so the last stage has fewer."""
    layers = [LAYER] * 32
    assert [len(part) for part in partition_layers(Schedule("1f1b", 2, 1), layers, Seconds(0, 0))] == [16, 16]
    assert [len(part) for part in partition_layers(Schedule("1f1b", 2, 1), layers, Seconds(4 * LAYER.total, 0))] == [
        18,
        14,
    ]
    slow = [Seconds(4, 8), *[Seconds(1, 2)] * 8]
    assert [len(part) for part in partition_layers(Schedule("1f1b", 2, 1), slow, Seconds(0, 0))] == [3, 6]
    for name, chunks in KINDS:
        schedule = Schedule(name, 4, chunks)
        parts = partition_layers(schedule, layers, HEAD)
        assert [index for part in parts for index in part] == list(range(32))
        assert len(parts) == schedule.stages
        seconds = stage_seconds(parts, layers, HEAD)
        busy = [sum(seconds[s].total for s in schedule.stages_of(r)) for r in range(4)]
        assert max(busy) <= (32 * LAYER.total + HEAD.total) / 4 + LAYER.total


def test_partitions_of_random_shapes():
    """Every layer is in one stage and the head in the last, which has no layer if the head is slow."""
    random, alone = Random(0), 0
    for _ in range(150):
        (name, chunks), ranks = random.choice(KINDS), random.choice((2, 3, 4))
        layers = [Seconds(random.uniform(0.5, 2), 2) for _ in range(ranks * chunks + random.randrange(8))]
        head = Seconds(random.choice((0, 1, 8, 30)), 0)
        parts = partition_layers(Schedule(name, ranks, chunks), layers, head)
        assert [index for part in parts for index in part] == list(range(len(layers)))
        assert all(parts[:-1])
        seconds = stage_seconds(parts, layers, head)
        for part, stage in zip(parts[:-1], seconds, strict=False):
            assert stage.total == pytest.approx(sum(layers[index].total for index in part))
        assert sum(stage.total for stage in seconds) == pytest.approx(sum(each.total for each in layers) + head.total)
        if not parts[-1]:
            assert seconds[-1] == head
            alone += 1
    assert alone > 10


def test_auto_chooses_the_fastest_schedule():
    layers = [LAYER] * 32
    schedule, parts = choose_schedule("auto", 4, layers, HEAD, 16)
    assert (schedule.name, len(parts)) == ("interleaved", schedule.stages)
    assert choose_schedule("1f1b", 4, layers, HEAD, 16)[0] == Schedule("1f1b", 4, 1)
    assert choose_schedule("interleaved", 4, layers[:8], HEAD, 16)[0].chunks == 2
    assert choose_schedule("auto", 4, layers[:4], Seconds(0, 0), 16)[0] == Schedule("1f1b", 4, 1)  # a layer each
    assert choose_schedule("auto", 2, layers, HEAD, 1)[0].name == "interleaved"  # 1f1b wants one for each process


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "batches", "said"),
    [
        ("auto", 4, 3, 16, r"parallel: 4.*\b3\b"),
        ("zb-v", 4, 4, 16, "pipeline_schedule: zb-v.*4 decoder"),
        ("1f1b", 4, 32, 3, "pipeline_schedule: 1f1b over 4.*3"),
        ("interleaved", 4, 32, 9, "pipeline_schedule: interleaved over 4.*9"),
    ],
)
def test_unsupported_micro_batches_are_refused(name, ranks, layers, batches, said):
    with pytest.raises(ConfigError, match=said) as raised:
        choose_schedule(name, ranks, [LAYER] * layers, HEAD, batches)
    assert raised.value.fix


def test_next_accepted_number_of_micro_batches():
    schedule = Schedule("interleaved", 4, 2)
    assert [schedule.next_accepted(number) for number in (1, 4, 8, 9)] == [1, 4, 8, 10]
    assert Schedule("1f1b", 4, 1).next_accepted(1) == 4
