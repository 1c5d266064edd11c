"""Learning rate schedules: transformers' values in every step of a run, for every parameter group, also resumed."""

import inspect

import pytest
import torch
from transformers import SchedulerType, TrainerCallback, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, GreedyLR

from halfbyte.optim import FOLLOW_METRIC, SCHEDULES
from halfbyte.runs.layout import checkpoint_folder
from halfbyte.train.callbacks import training_arguments
from halfbyte.train.optimizer_checks import check_schedule
from halfbyte.utils.errors import ConfigError
from tests.helpers.tiny_runs import make_loop, rows, run_config

STEPS, WARMUP, SAVED = 12, 3, 5
OPTIONS = {
    "cosine_with_restarts": {"num_cycles": 3},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
    "polynomial": {"power": 2.0, "lr_end": 1e-5},
    "inverse_sqrt": {"timescale": 4},
    "warmup_stable_decay": {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
    "reduce_lr_on_plateau": {"patience": 1, "factor": 0.5},
    "greedy": {"patience": 1, "factor": 0.5, "min_lr": 1e-5, "max_lr": 0.05, "smooth": True, "window_size": 2},
}
LOSSES = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0, 0.5, 0.4, 0.6, 0.6, 0.6]  # of the evaluation after each step
KEYS = {"max_steps": STEPS, "warmup_steps": WARMUP, "eval_steps": 1, "save_steps": SAVED, "save_total_limit": None}
KEYS |= {"loraplus_lr_ratio": 16.0, "learning_rate": 1e-3, "eval_split_size": 2}
GROUPS = [1e-3, 1e-6, 1.6e-2, 1.6e-2]  # A, adapters of embeddings, B, and B without weight decay


class Rates(TrainerCallback):
    """The learning rates of all groups in each step."""

    def __init__(self):
        self.rates = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
        self.rates.append([float(group["lr"]) for group in optimizer.param_groups])


def rates_of(output, monkeypatch, checkpoint=None, **keys):
    loop, noted = make_loop(run_config(output, **KEYS | keys), held_out=rows(2, 9)), Rates()
    monkeypatch.setattr(
        loop, "_held_out_numbers", lambda *_: {"loss": LOSSES[min(loop.state.global_step, STEPS) - 1]}, raising=True
    )
    loop.add_callback(noted)
    loop.train(checkpoint)
    return noted.rates


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_has_the_rate_of_transformers(name, tmp_path, monkeypatch):
    options = OPTIONS.get(name, {})
    keys = {"lr_scheduler_type": name, "lr_scheduler_kwargs": options}
    rates = rates_of(tmp_path / "whole", monkeypatch, **keys)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in GROUPS], lr=1e-3)
    schedule = get_scheduler(name, optimizer, WARMUP, STEPS, options)
    expected = []
    for loss in LOSSES:
        expected.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step(*([loss] if name in FOLLOW_METRIC else []))
    assert rates == expected
    assert len({tuple(each) for each in rates}) > 1 or name == "constant"
    resumed = rates_of(tmp_path / "resumed", monkeypatch, tmp_path / "whole" / checkpoint_folder(SAVED), **keys)
    assert resumed == rates[SAVED:]


@pytest.mark.parametrize("name", SCHEDULES)
def test_options_are_those_of_transformers_with_their_defaults(name):
    function = {"greedy": GreedyLR, "reduce_lr_on_plateau": torch.optim.lr_scheduler.ReduceLROnPlateau}.get(
        name, TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]
    )
    given = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    parameters = {key: each for key, each in inspect.signature(function).parameters.items() if key not in given}
    assert SCHEDULES[name].keys() == parameters.keys()
    for key, parameter in parameters.items():
        if parameter.default not in (None, inspect.Parameter.empty):
            assert SCHEDULES[name][key].default == pytest.approx(parameter.default), key


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("cosine", {"min_lr": 0.1}, "lr_scheduler_kwargs"),
        ("cosine", {"num_cycle": 0.5}, "lr_scheduler_kwargs"),
        ("cosine_with_min_lr", None, "lr_scheduler_kwargs"),
        ("cosine_with_min_lr", {"min_lr": 1e-5, "min_lr_rate": 0.1}, "lr_scheduler_kwargs"),
        ("warmup_stable_decay", None, "lr_scheduler_kwargs"),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "exponential"}, "lr_scheduler_kwargs"),
        ("polynomial", {"power": "two"}, "lr_scheduler_kwargs"),
        ("reduce_lr_on_plateau", {"factor": 1.0}, "lr_scheduler_kwargs"),
        ("reduce_lr_on_plateau", None, "lr_scheduler_type"),
        ("greedy", None, "lr_scheduler_kwargs"),
    ],
)
def test_options_of_another_name_or_value_are_refused(tmp_path, name, options, key):
    keys = {"lr_scheduler_type": name, "lr_scheduler_kwargs": options, "eval_split_size": 2 if "kwargs" in key else 0}
    with pytest.raises(ValueError, match=key):
        run_config(tmp_path, learning_rate=1e-3, **keys)


def test_more_decay_than_steps_is_refused(tmp_path):
    options = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}}
    config = run_config(tmp_path, **KEYS | options)
    arguments = training_arguments(config, torch.device("cpu"), torch.float32, rows=12, evaluate=False)
    with pytest.raises(ConfigError) as refused:
        check_schedule(config, arguments, torch.optim.SGD([torch.zeros(1)], lr=1e-3), STEPS)
    assert "lr_scheduler_kwargs" in refused.value.message
