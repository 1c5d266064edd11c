"""Optimizers of other packages: arguments as in transformers, bytes, modes of schedule-free ones, LOMO in the loop."""

import importlib.metadata

import pytest
import torch
from transformers import Trainer, TrainingArguments, trainer_optimizer

from halfbyte.config import load_config
from halfbyte.optim import OPTIMIZERS, trained_parameters
from halfbyte.train.optimizer_checks import check_loss_scale, check_optimizer
from halfbyte.utils.errors import ConfigError
from tests.helpers import optimizer_packages
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.tiny_runs import losses, make_loop, rows, run_config, tiny_llama

ROWS = [name for name, row in OPTIMIZERS.items() if row.package]
LOMO = ["lomo", "adalomo"]
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.99, "warmup_steps": 5}
OPTIONS = {
    "schedule_free_adamw": {"r": 0.5, "weight_lr_power": 1.5}, "schedule_free_sgd": {"r": 0.5},
    "grokadamw": {"lamb": 3.0, "alpha_init": 0.9}, "stable_adamw": {"max_lr": 0.1},
    "adamw_torch_8bit": {"bf16_stochastic_round": True},
    "adamw_anyprecision": {"use_kahan_summation": True, "momentum_dtype": "bfloat16"},
}  # fmt: skip
WHOLE = {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0}


@pytest.fixture
def packages(monkeypatch):
    optimizer_packages.install(monkeypatch)
    return optimizer_packages.MADE


def settings(name, **keys):
    return OptimizerSettings(optim=name, **SETTINGS | {"weight_decay": 0.0} if name in LOMO else SETTINGS, **keys)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in ROWS), *OPTIONS.items()])
def test_arguments_equal_those_of_transformers(name, options, packages, monkeypatch, tmp_path):
    for package in ("schedulefree", "lomo", "grokadamw", "torch_optimi", "torchao"):
        monkeypatch.setattr(trainer_optimizer, f"is_{package}_available", lambda *version: True)
    known = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda each: "0.15" if each == "torchao" else known(each))
    model, config = tiny_llama(), settings(name, optim_args=options)
    ours = OPTIMIZERS[name].make(model, config)
    (mine,) = packages
    packages.clear()
    text = ", ".join(f"{key}={value}" for key, value in options.items())
    keys = SETTINGS | {"weight_decay": config.weight_decay}
    arguments = TrainingArguments(
        str(tmp_path), optim=name, optim_args=text or None, use_cpu=True, report_to="none", **keys
    )
    Trainer(model, arguments).create_optimizer()
    (theirs,) = packages
    assert mine[0] == theirs[0]
    groups, others = (
        [tuple(map(id, group["params"])) for group in made[1].pop("params", [])] for made in (mine, theirs)
    )
    assert groups == others
    if "block_size" in theirs[1]:
        theirs[1]["block_size"] = int(theirs[1]["block_size"])
    assert mine[1] == theirs[1]
    assert bool(OPTIMIZERS[name].has_modes) == hasattr(ours, "train")


@pytest.mark.parametrize("name", ROWS)
def test_a_missing_package_is_named_before_loading(name, tmp_path):
    row = OPTIMIZERS[name]
    layerwise = {"max_grad_norm": 0.0} if name in LOMO else {}
    with pytest.raises(ConfigError, match=row.package) as caught:
        check_optimizer(run_config(tmp_path, optim=name, **layerwise), torch.device("cpu"))
    assert row.requirement in caught.value.fix


@pytest.mark.parametrize(("name", "options", "expected"), [
    ("schedule_free_adamw", {}, 8), ("schedule_free_radam", {}, 8), ("schedule_free_sgd", {}, 4), ("lomo", {}, 0),
    ("grokadamw", {}, 12), ("stable_adamw", {}, 8), ("adamw_anyprecision", {}, 8),
    ("adamw_anyprecision", {"use_kahan_summation": True, "variance_dtype": "bfloat16"}, 4 + 2 + 2),
])  # fmt: skip
def test_state_bytes_per_element(name, options, expected):
    model = tiny_llama()
    elements = sum(parameter.numel() for parameter in trained_parameters(model).values())
    assert OPTIMIZERS[name].state_bytes(model, settings(name, optim_args=options)) == expected * elements


def loop_of(tmp_path, name, held_out=None, **keys):
    layerwise = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1} if name in LOMO else {}
    common = {"max_steps": 8, "save_steps": 2, "save_total_limit": None, "lr_scheduler_type": "linear"}
    config = run_config(tmp_path, optim=name, **common | WHOLE | layerwise | keys)
    return make_loop(config, held_out=held_out)


def assert_equal_weights(loop, other):
    for name, parameter in loop.model.named_parameters():
        assert torch.equal(other.model.get_parameter(name), parameter), name


@pytest.mark.parametrize("name", ["schedule_free_adamw", *LOMO])
def test_a_resumed_run_equals_an_uninterrupted_one(name, packages, tmp_path):
    rate = 1e-3 if name == "adalomo" else 1e-2
    whole, again = (loop_of(tmp_path / folder, name, learning_rate=rate) for folder in ("whole", "again"))
    whole.train()
    again.train(tmp_path / "whole" / "checkpoint-4")
    assert_equal_weights(whole, again)
    assert losses(again) == losses(whole)[4:]
    assert losses(whole)[-1] < losses(whole)[0]


def test_schedule_free_weights_are_evaluated_and_saved(packages, tmp_path):
    """Evaluations, checkpoints and the finished run have the averages; the steps between them train other weights."""
    loop = loop_of(tmp_path, "schedule_free_adamw", rows(4, seed=3), eval_steps=3)
    modes, held_out_numbers = [], loop._held_out_numbers

    def recorded(*arguments):
        modes.extend(group["train_mode"] for group in loop.optimizer.param_groups)
        return held_out_numbers(*arguments)

    loop._held_out_numbers = recorded
    loop.train()
    assert modes
    assert not any(modes)
    saved = torch.load(tmp_path / "checkpoint-4" / "optimizer.pt", weights_only=True)  # a step without evaluation
    assert not any(group["train_mode"] for group in saved["param_groups"])
    fresh = loop_of(tmp_path / "fresh", "schedule_free_adamw")
    fresh.train(tmp_path / "checkpoint-8")
    assert not any(group["train_mode"] for group in fresh.optimizer.param_groups)
    assert_equal_weights(loop, fresh)
    averages = {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}
    loop.optimizer.train()
    assert any(not torch.equal(averages[name], parameter) for name, parameter in loop.model.named_parameters())


def test_lomo_steps_as_sgd(packages, tmp_path):
    """The last weight, the schedule's rates and the norms are those of plain gradient descent."""
    keys = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "warmup_steps": 3}
    loops = [loop_of(tmp_path / name, name, **keys) for name in ("lomo", "sgd")]
    for loop in loops:
        loop.train()
    records = [[each for each in loop.metrics.records() if each["kind"] == "train"] for loop in loops]
    for key in ("loss", "grad_norm", "learning_rate"):
        mine, theirs = ([record[key] for record in some] for some in records)
        assert mine == pytest.approx(theirs, rel=1e-5), key
    for mine, theirs in zip(loops[0].model.parameters(), loops[1].model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOMO)
def test_lomo_refuses_what_it_cannot_do(name, packages, tmp_path):
    base = {"optim": name, "max_grad_norm": 0.0, **WHOLE}
    for keys in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"dtype": "float16"},
                 {"parallel": {"shard": 2}}, {"parallel": {"data": 2}}):  # fmt: skip
        with pytest.raises(ConfigError, match=next(iter(keys)).replace("parallel", "optim")):
            load_config(None, {"model_name_or_path": "m", "dataset": "d", **base, **keys})
    with pytest.raises(ConfigError, match=name):
        check_loss_scale(run_config(tmp_path, **base), torch.float16)
    for key, value in {"weight_decay": 0.1, "embedding_learning_rate": 1e-3}.items():
        with pytest.raises(ConfigError, match=key):
            check_optimizer(run_config(tmp_path, **base | {key: value}), torch.device("cpu"))
