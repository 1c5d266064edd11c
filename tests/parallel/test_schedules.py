"""Schedules as torch has them, and what the simulation makes of them."""

import pytest

from halfbyte.errors import ConfigError
from halfbyte.parallel.schedules import Action, Schedule, Seconds, chosen, cut_layers, programs, simulate, stage_seconds

KINDS = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("zb-1p", 2))
LAYER, HEAD = Seconds(1, 2, again=1, weights=0.03), Seconds(4.8, 0)
# Seconds of a stage, whether it recomputes ahead → idle percent of `KINDS`, 4 processes and 16 micro-batches
TABLE = {
    "everything trained": (Seconds(1, 1, weights=1), False, (15.8, 8.6, 4.5, 3.0, 3.0)),
    "kept": (Seconds(1, 1, weights=0.03), False, (15.8, 8.6, 4.5, 8.2, 8.3)),
    "recomputed": (LAYER, False, (15.8, 8.6, 4.5, 10.9, 8.4)),
    "recomputed ahead": (LAYER, True, (11.2, 5.9, 3.0, 5.7, 5.7)),
}


def idle(name, chunks, seconds, ahead, ranks=4, batches=16):
    schedule = Schedule(name, ranks, chunks)
    return 100 * simulate(schedule.orders(batches), [seconds] * schedule.stages, ahead=ahead).idle


@pytest.mark.parametrize("row", TABLE)
def test_idle_time_of_torchs_schedules(row):
    seconds, ahead, expected = TABLE[row]
    assert [round(idle(name, chunks, seconds, ahead), 1) for name, chunks in KINDS] == list(expected)


def test_the_idle_time_of_1f1b_is_the_known_one():
    """(p - 1) / (m + p - 1), whatever a stage's seconds; recomputing ahead saves a part of the drain alone."""
    for ranks, batches in ((2, 8), (4, 16), (8, 8)):
        expected = 100 * (ranks - 1) / (batches + ranks - 1)
        assert idle("1f1b", 1, Seconds(3, 7), False, ranks, batches) == pytest.approx(expected)
        assert idle("1f1b", 1, LAYER, True, ranks, batches) < expected


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 4), (4, 8)])
def test_every_stage_computes_every_micro_batch_once(name, chunks, ranks, batches):
    schedule = Schedule(name, ranks, chunks)
    orders = schedule.orders(batches)
    done = [action for order in orders for action in order]
    each = [(stage, batch) for stage in range(schedule.stages) for batch in range(batches)]
    assert sorted((a.stage, a.batch) for a in done if a.kind == "F") == each
    assert sorted((a.stage, a.batch) for a in done if a.kind in "BI") == each
    assert sorted(a.stage for rank in range(ranks) for a in set(orders[rank])) == sorted(a.stage for a in done)
    assert sorted(stage for rank in range(ranks) for stage in schedule.stages_of(rank)) == list(range(schedule.stages))


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("ahead", [False, True])
def test_messages_wait_for_nobody_in_a_circle(name, chunks, ahead):
    """Each process does its program in order, a send waiting for its receive: all come to their end."""
    schedule = Schedule(name, 4, chunks)
    seconds = [Seconds(1 + stage % 3, 2, again=1) for stage in range(schedule.stages)]
    lines = [list(line) for line in programs(schedule.orders(8), seconds, ahead=ahead)]
    sent = sum(action.kind.startswith("send") for line in lines for action in line)
    assert sent == sum(action.kind.startswith("receive") for line in lines for action in line) > 0
    assert sent == 2 * 8 * sum(a != b for a, b in zip(owners(schedule), owners(schedule)[1:], strict=False))
    while any(lines):
        moved = False
        for line in lines:
            while line and not line[0].kind.startswith(("send", "receive")):
                line.pop(0)
                moved = True
            if not line or not line[0].kind.startswith("send"):
                continue
            kind, stage, batch = line[0]
            taken = Action(f"receive {kind[-1]}", stage + (1 if kind[-1] == "F" else -1), batch)
            for other in lines:
                if other and other[0] == taken:
                    other.pop(0)
                    line.pop(0)
                    moved = True
                    break
        assert moved, lines


def owners(schedule):
    return [schedule.process_of(stage) for stage in range(schedule.stages)]


def test_an_interleaved_order_where_processes_wait_for_each_other_is_found():
    with pytest.raises(AssertionError, match="each process waits for another"):
        simulate(((Action("B", 0, 0),), (Action("B", 1, 0), Action("F", 1, 0))), [LAYER, LAYER, LAYER])


def test_layers_are_cut_by_seconds():
    """Head and loss of an 8B weigh several layers: the last stage has fewer; nothing is left out."""
    layers = [LAYER] * 32
    assert [len(part) for part in cut_layers(Schedule("1f1b", 2, 1), layers, Seconds(0, 0))] == [16, 16]
    assert [len(part) for part in cut_layers(Schedule("1f1b", 2, 1), layers, Seconds(4 * LAYER.total, 0))] == [18, 14]
    slow = [Seconds(4, 8), *[Seconds(1, 2)] * 8]
    assert [len(part) for part in cut_layers(Schedule("1f1b", 2, 1), slow, Seconds(0, 0))] == [3, 6]
    for name, chunks in KINDS:
        schedule = Schedule(name, 4, chunks)
        parts = cut_layers(schedule, layers, HEAD)
        assert [index for part in parts for index in part] == list(range(32))
        assert len(parts) == schedule.stages
        busy = [sum(stage_seconds(parts[s], layers, HEAD).total for s in schedule.stages_of(r)) for r in range(4)]
        assert max(busy) <= (32 * LAYER.total + HEAD.total) / 4 + LAYER.total


def test_auto_takes_what_ends_first():
    layers = [LAYER] * 32
    schedule, parts = chosen("auto", 4, layers, HEAD, 16, ahead=True)
    assert (schedule.name, len(parts)) == ("interleaved", schedule.stages)
    assert chosen("1f1b", 4, layers, HEAD, 16)[0] == Schedule("1f1b", 4, 1)
    assert chosen("interleaved", 4, layers[:8], HEAD, 16)[0].chunks == 2
    assert chosen("auto", 4, layers[:4], Seconds(0, 0), 16)[0] == Schedule("1f1b", 4, 1)  # a layer each
    assert chosen("auto", 2, layers, HEAD, 1)[0].name == "interleaved"  # 1f1b wants one for each process


@pytest.mark.parametrize(
    ("name", "ranks", "layers", "batches", "said"),
    [
        ("auto", 4, 3, 16, "parallel: 4 pipeline stages for a model of 3 decoder layers"),
        ("zb-v", 4, 4, 16, "pipeline_schedule: zb-v gives each process 2 stages or more, and there are 4 decoder"),
        ("1f1b", 4, 32, 3, "pipeline_schedule: 1f1b over 4 processes takes no step of 3 micro-batches"),
        ("interleaved", 4, 32, 9, "pipeline_schedule: interleaved over 4 processes takes no step of 9 micro-batches"),
    ],
)
def test_what_no_schedule_takes(name, ranks, layers, batches, said):
    with pytest.raises(ConfigError, match=said) as raised:
        chosen(name, ranks, [LAYER] * layers, HEAD, batches)
    assert raised.value.fix


def test_the_next_number_of_micro_batches():
    schedule = Schedule("interleaved", 4, 2)
    assert [schedule.at_least(number) for number in (1, 4, 8, 9)] == [1, 4, 8, 10]
    assert Schedule("1f1b", 4, 1).at_least(1) == 4
