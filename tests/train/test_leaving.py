"""A signal saves a checkpoint and ends the run; the resumed run is bit-equal to an uninterrupted one."""

import contextlib
import os
import signal
import time

import pytest

from halfbyte.runs import checkpoints
from halfbyte.train import loop as loops
from halfbyte.utils.files import new_directory
from halfbyte.utils.processes import Stopped, raise_on_signals, request_on_signals
from tests.helpers.tiny_runs import comparable, make_loop, rows, run_config

# 20 rows, 2 a batch, 3 batches a step: 4 steps an epoch
KEYS = {"num_train_epochs": 3, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2}
KEYS |= {"save_steps": 100, "eval_steps": 2, "logging_steps": 3, "save_total_limit": 2}


def loop_of(output):
    return make_loop(run_config(output, **KEYS), train=rows(20), held_out=rows(7, 9))


@pytest.fixture(autouse=True)
def _as_a_terminal_has_them():
    """Signals that are ignored, as in the background of a shell or after nohup, stay ignored."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    loop = loop_of(tmp_path_factory.mktemp("uninterrupted"))
    loop.train()
    return loop


def interrupted(output, moment, number=signal.SIGTERM):
    """A run that is asked at its `moment`-th batch, resumed until its end; and the checkpoint it was resumed from."""
    loop, count = loop_of(output), 0

    def counted(inner):
        def compute(batch):
            nonlocal count
            count += 1
            if count == moment:
                signal.raise_signal(number)
            return inner(batch)

        return compute

    loop.sums, loop.held_out_values = counted(loop.sums), counted(loop.held_out_values)
    with pytest.raises(Stopped) as stopped:
        loop.train()
    assert stopped.value.number == number
    loop, checkpoint = loop_of(output), checkpoints.starting_point(loop.config, True)
    loop.metrics.keep_until(checkpoints.step_of(checkpoint))
    loop.train(checkpoint)
    return loop, checkpoint


def same(one, other):
    theirs = dict(other.model.named_parameters())
    return comparable(one) == comparable(other) and all(
        bool((p == theirs[name]).all()) for name, p in one.model.named_parameters()
    )


# A step has 3 micro-batches; the last of an epoch has 1, and an evaluation of 7 rows has 4 batches.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("number", "moment", "step"),
    [
        (signal.SIGTERM, 2, 1),  # in the first step
        (signal.SIGHUP, 9, 2),  # in the evaluation after step 2
        (signal.SIGINT, 14, 4),  # in the last step of an epoch, which evaluates, too
    ],
)
def test_the_step_is_finished_and_saved_and_the_resumed_run_is_bit_equal(uninterrupted, tmp_path, number, moment, step):
    loop, checkpoint = interrupted(tmp_path, moment, number)
    assert checkpoint.name == f"checkpoint-{step}"
    assert same(loop, uninterrupted)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("moment", "step", "owes"),
    [
        (5, 1, False),  # in the second step: the checkpoint is of the first
        (8, 2, True),  # in the evaluation after the second
        (15, 4, True),  # in the one at the epoch's end
    ],
)
def test_work_beyond_the_timeout_is_dropped_and_repeated(uninterrupted, tmp_path, monkeypatch, moment, step, owes):
    monkeypatch.setattr(loops, "LEAVE_TIMEOUT", 0.0)
    loop, checkpoint = interrupted(tmp_path, moment)
    assert checkpoint.name == f"checkpoint-{step}"
    assert checkpoints.read_state(checkpoint).get("owes_evaluation", False) == owes
    assert same(loop, uninterrupted)


def test_a_signal_in_the_first_step_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loops, "LEAVE_TIMEOUT", 0.0)
    loop = loop_of(tmp_path)
    loop.metrics.listeners.append(lambda record: pytest.fail("a step was done"))
    inner = loop.sums
    loop.sums = lambda batch: signal.raise_signal(signal.SIGTERM) or inner(batch)
    with pytest.raises(Stopped):
        loop.train()
    assert not list(tmp_path.iterdir())


# --- signals ---------------------------------------------------------------------------------------------------------


def test_a_second_signal_ends_at_once_and_a_third_has_the_default_handler():
    said, third = [], []
    with contextlib.suppress(Stopped), request_on_signals(said.append) as request:
        signal.raise_signal(signal.SIGTERM)
        assert (said, request.number) == ([signal.SIGTERM], signal.SIGTERM)
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            third.append(signal.getsignal(signal.SIGINT))
        pytest.fail("it went on")
    assert third == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_ignored_signals_and_other_handlers_are_not_replaced():
    def theirs(*_):
        """Of a job manager."""

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGTERM, theirs)
    try:
        with raise_on_signals(), request_on_signals(print):
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_file_being_written_is_removed(tmp_path, number):
    with pytest.raises(Stopped) as stopped, raise_on_signals(), new_directory(tmp_path / "merged"):
        signal.raise_signal(number)
    assert stopped.value.number == number
    assert not list(tmp_path.iterdir())


def test_a_forked_worker_has_default_handlers(tmp_path):
    reads, writes = os.pipe()
    with raise_on_signals():
        child = os.fork()
        if not child:
            os.write(writes, b"here")  # a signal that comes before Python is there is lost
            time.sleep(60)
            os._exit(0)
        os.read(reads, 4)
        os.kill(child, signal.SIGTERM)
        assert os.waitpid(child, 0)[1] == signal.SIGTERM
    os.close(reads)
    os.close(writes)
