"""A step's numbers are read late, records keep their order, and a broken step changes nothing."""

from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from halfbyte.train import guards, metrics_log
from halfbyte.utils import notices
from halfbyte.utils.errors import TrainingError
from tests.helpers.tiny_runs import losses, make_loop, rows, run_config

FUSED, PLAIN = "adamw_torch_fused", "adamw_torch"
FOUR = {"per_device_train_batch_size": 4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Happenings(TrainerCallback):
    """Records the events of a run in order, and weights and moments after each step."""

    def __init__(self, loop):
        self.loop, self.list, self.held, self.logged = loop, [], {}, []
        loop.add_callback(self)
        loop.metrics.listeners.append(lambda record: self.list.append(f"{record['kind']} {record['step']}"))

    def on_step_begin(self, args, state, control, **_):
        self.list.append(f"launch {state.global_step + 1}")

    def on_step_end(self, args, state, control, **_):
        self.held[state.global_step] = self.everything()

    def on_log(self, args, state, control, logs=None, **_):
        if "learning_rate" in logs:
            self.logged.append((state.global_step, state.epoch, logs["loss"]))

    def everything(self):
        """Return copies of weights and moments."""
        weights = [p.detach().clone() for p in self.loop.trained]
        moments = [v.clone() for state in self.loop.optimizer.state.values() for v in state.values()]
        return weights + moments


def poisoned(loop, step, value=float("nan")):
    """Multiply embeddings by `value` from `step` on; a graph reads it from the device."""
    embedding = loop.model.get_input_embeddings()
    factor = torch.ones((), device=embedding.weight.device)
    embedding.register_forward_hook(lambda module, inputs, output: output * factor)

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step + 1 == step:
                factor.fill_(value)

    loop.add_callback(Poison())


@pytest.fixture(params=DEVICES)
def loop_on(request, tmp_path):
    """Makes a loop; on a GPU for the fused model, its micro-batches as CUDA graphs."""

    def make(**keys):
        return make_loop(run_config(tmp_path, device=request.param, **keys))

    return make


@pytest.mark.parametrize(("optim", "launched"), [(FUSED, 7), (PLAIN, 6), ("muon", 7), ("muon_8bit", 7)])
def test_a_broken_step_changes_no_weight_and_no_moment(loop_on, optim, launched):
    """With a guarded optimizer the host finds out when one more step is launched, which changes nothing either."""
    loop = loop_on(max_steps=9, optim=optim, weight_decay=0.1, save_steps=4)
    happened = Happenings(loop)
    poisoned(loop, 6)
    with pytest.raises(TrainingError, match="step 6:") as stopped:
        loop.train()
    assert "checkpoint-4" in stopped.value.fix
    assert [event for event in happened.list if "launch" in event][-1] == f"launch {launched}"
    assert len(losses(loop)) == 5
    before, after = happened.held[5], happened.everything()
    assert len(before) == len(after) > len(loop.trained)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(happened.held[4], after, strict=True))


def test_a_broken_step_before_a_checkpoint_or_the_end_is_not_saved(tmp_path):
    for step in (3, 4):
        loop = make_loop(run_config(tmp_path / str(step), max_steps=4, save_steps=3))
        poisoned(loop, step)
        with pytest.raises(TrainingError, match=f"step {step}:.*nan"):
            loop.train()
        assert [path.name for path in loop.output.glob("checkpoint-*")] == ["checkpoint-3"] * (step - 3)


@pytest.mark.parametrize("optim", [FUSED, PLAIN])
def test_records_are_written_a_step_late_and_before_what_depends_on_them(tmp_path, optim):
    held_out = rows(3, 9)
    loop = make_loop(run_config(tmp_path, max_steps=6, save_steps=4, eval_steps=3, optim=optim), None, held_out)
    happened = Happenings(loop)
    loop.train()
    until_evaluation = ["launch 1", "launch 2", "train 1", "launch 3", "train 2", "train 3", "eval 3"]
    until_checkpoint = ["launch 4", "train 4"]
    until_end = ["launch 5", "launch 6", "train 5", "train 6", "eval 6"]
    assert happened.list == until_evaluation + until_checkpoint + until_end
    trained = [record for record in loop.metrics.records() if record["kind"] == "train"]
    assert happened.logged == [(record["step"], record["epoch"], record["loss"]) for record in trained]
    saved = loop.state.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert [entry["step"] for entry in saved.log_history if "loss" in entry] == [1, 2, 3, 4]


def test_a_run_that_raises_has_written_the_steps_before(tmp_path):
    loop = make_loop(run_config(tmp_path, max_steps=6))
    forward = loop.forward

    def failing(*arguments):
        if loop.state.global_step == 3:
            raise KeyboardInterrupt
        return forward(*arguments)

    loop.forward = failing
    with pytest.raises(KeyboardInterrupt):
        loop.train()
    assert len(losses(loop)) == 3


def test_step_seconds_exclude_evaluations(tmp_path, monkeypatch):
    """A clock by hand: a forward takes a second, an evaluation 100."""
    held_out = rows(3, 9)
    loop = make_loop(run_config(tmp_path, max_steps=6, eval_steps=2), None, held_out)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(metrics_log, "perf_counter", lambda: clock.now)
    one_forward, evaluation = loop.forward, loop.evaluate

    def forward(*arguments):
        clock.now += 1
        return one_forward(*arguments)

    def evaluate():
        clock.now += 100
        return evaluation()

    loop.forward, loop.evaluate = forward, evaluate
    loop.train()
    assert clock.now == 306
    assert [r["step_seconds"] for r in loop.metrics.records() if r["kind"] == "train"] == [1.0] * 6


@pytest.mark.parametrize("number", [1.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("device", DEVICES)
def test_a_guarded_optimizer_skips_numbers_that_are_not_finite(device, kind, number):
    weight = nn.Parameter(torch.ones(5, device=device))
    optimizer = kind([weight], lr=0.1, weight_decay=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    guards.skip_if_not_finite(optimizer, torch.tensor([2.0, 3.0], device=device))
    optimizer.step()
    before = [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]
    weight.grad = torch.full_like(weight, number)
    guards.skip_if_not_finite(optimizer, torch.tensor([2.0, number], device=device))
    optimizer.step()
    after = [weight.detach(), *optimizer.state[weight].values()]
    same = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert same == [number != 1.0] * 4


@pytest.mark.gpu
def test_a_step_in_the_middle_of_a_run_never_waits_for_the_device(tmp_path):
    """Steps 8 to 20, over several epochs, with a record each; any wait but for an event raises."""
    loop = make_loop(run_config(tmp_path, device="cuda", max_steps=24, save_steps=100, **FOUR))

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            torch.cuda.set_sync_debug_mode("error" if 8 <= state.global_step < 20 else "default")

    loop.add_callback(Watch())
    try:
        loop.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(losses(loop)) == 24
    assert "cuda-graph" not in notices.notices_so_far()


@pytest.mark.gpu
def test_the_device_is_behind_the_host_between_steps(tmp_path):
    """Each forward takes the device some 50 ms: when a step ends for the host, the device is not there yet."""
    loop = make_loop(run_config(tmp_path, device="cuda", max_steps=16, save_steps=100, **FOUR))
    loop.model.get_input_embeddings().register_forward_hook(lambda *_: torch.cuda._sleep(85_000_000))  # clocks
    behind = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            event = torch.cuda.Event()
            event.record()
            behind.append(not event.query())

    loop.add_callback(Watch())
    started = perf_counter()
    loop.train()
    spent = perf_counter() - started
    assert all(behind[8:])
    seconds = [record["step_seconds"] for record in loop.metrics.records()]
    assert min(seconds[8:]) > 0.03  # the device's, not the host's
    assert sum(seconds) <= spent  # and none counted twice
