"""Functions in a bounded child process: limits, failures, and later items."""

import os
import pickle
import signal
import sys
import time

import pytest

from halfbyte.reading import bounded
from halfbyte.reading.bounded import Bounded, Failure
from halfbyte.utils.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits need fork")


def test_results_in_order_and_errors_in_their_places():
    def invert(number):
        if number == 2:
            raise DataError("a", "b")
        return 1 / number

    double, zero, error, last = Bounded(invert)([1, 0, 2, 4])
    assert (double, last) == (1.0, 0.25)
    assert zero == Failure("division by zero")
    assert (error.message, error.fix) == ("a", "b")


def loop(_):
    while True:
        pass


def power(_):
    """Runs in C, which Python cannot interrupt."""
    return 10**10**8 % 7


def memory(_):
    return len(b"x" * 2**32)


def slowly_more(_):
    text = "x"
    while True:
        text += text


def death(_):
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (loop, "it takes too long"),
        (power, "it takes too long"),
        (memory, "it takes more than 512 MiB of memory"),
        (slowly_more, "it takes "),
        (death, "it ends the process that runs it"),
    ],
)
def test_a_runaway_item_is_killed_and_the_others_finish(monkeypatch, function, said):
    monkeypatch.setattr(bounded, "SECONDS", 0.2)
    begin = time.monotonic()
    first, failed, last = Bounded(lambda item: function(item) if item == 1 else item)([0, 1, 2])
    assert (first, last) == (0, 2)
    assert failed.reason.startswith(said)
    assert time.monotonic() - begin < 20


def test_restart_clock_gives_each_call_the_full_limit(monkeypatch):
    monkeypatch.setattr(bounded, "SECONDS", 0.2)

    def busy(again):
        for _ in range(4):
            again()
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
        return "done"

    assert Bounded(busy)([bounded.restart_clock]) == ["done"]
    assert Bounded(lambda _: bounded.restart_clock(1.0) or busy(int))([0]) == ["done"]
    assert Bounded(busy)([int]) == [Failure("it takes too long")]


def test_an_idle_child_exits_and_the_next_call_forks_again(monkeypatch):
    monkeypatch.setattr(bounded, "IDLE", 0.05)
    bound = Bounded(lambda _: os.getpid())
    first, again = bound([0, 1])
    assert first == again != os.getpid()
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert bound([0]) != [first]


def test_the_child_ends_with_its_owner_and_holds_none_of_its_files(tmp_path):
    with open(tmp_path / "lock", "w") as held:
        bound = Bounded(lambda _: (os.getpid(), os.path.exists(f"/proc/self/fd/{held.fileno()}")))
        [(child, has)] = bound([0])
    assert not has
    del bound
    assert not os.path.exists(f"/proc/{child}")


def test_it_pickles_without_its_child():
    bound = Bounded(len)
    assert bound(["ab"]) == [2]
    assert pickle.loads(pickle.dumps(bound))(["abc"]) == [3]
