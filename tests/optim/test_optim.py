"""The optimizer table against transformers' Trainer: optimizers, state bytes, and adding a row."""

import json
import shutil

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from typer.testing import CliRunner

from halfbyte.adapters.lora import add_adapter
from halfbyte.cli.app import app
from halfbyte.config import dump_config, load_config
from halfbyte.ops.optimizer import ROUNDINGS, RULES
from halfbyte.ops.optimizer_state import STORAGES as state_storages
from halfbyte.optim import (
    ADAM_KEYS,
    OPTIMIZERS,
    STORAGE_OF_BITS,
    Optimizer,
    fused,
    parameter_groups,
    trained_parameters,
)
from halfbyte.optim.fused import FusedOptimizer
from halfbyte.optim.options import SLICED, STORAGES
from halfbyte.train.run import finetune
from halfbyte.utils.errors import ConfigError
from tests.helpers.optimizer_settings import OptimizerSettings
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows
from tests.helpers.tiny_runs import run_config, tiny_llama

OWN = [name for name, row in OPTIMIZERS.items() if row.takes_targets or row.updates == "block" or "muon" in name]
NEW = ["lamb", "lars"]  # names that transformers does not have
PACKAGES = [name for name, row in OPTIMIZERS.items() if row.package]  # tests/optim/test_packages.py
OTHERS = [name for name in OPTIMIZERS if name not in (*OWN, *PACKAGES)]
LAYERWISE = [name for name, row in OPTIMIZERS.items() if row.updates == "backward"]
OPTIONS = {  # options that change the state
    "sgd": {"momentum": 0.9, "nesterov": True}, "rmsprop": {"momentum": 0.5, "centered": True, "alpha": 0.9},
    "adagrad": {"lr_decay": 0.1}, "ademamix": {"beta3": 0.99, "t_alpha": 5},
}  # fmt: skip
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.99}


class Model(nn.Module):
    """Parameters of every kind: large and small, in two dtypes, embeddings, norms, biases, frozen ones."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.up = nn.Linear(64, 300, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(300, elementwise_affine=True)
        self.scaled = nn.Linear(5, 3, bias=False)
        self.experts = nn.Parameter(torch.ones(3, 40, 50))
        self.frozen = nn.Parameter(torch.ones(40, 50), requires_grad=False)


def settings(name, tmp_path, **keys):
    layerwise = {"max_grad_norm": 0.0} if name in LAYERWISE else {}
    read = {key: value for key, value in SETTINGS.items() if key in OPTIMIZERS[name].adam_keys or key not in ADAM_KEYS}
    return run_config(tmp_path, optim=name, **read, **layerwise, **keys)


def known(groups, model):
    """The parameter groups with names instead of parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [group | {"params": [names[id(parameter)] for parameter in group["params"]]} for group in groups]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "options"), [(name, {}) for name in OTHERS if name not in NEW] + [*OPTIONS.items()])
@pytest.mark.parametrize("whole", [False, True])
def test_equals_the_optimizer_of_transformers(whole, name, options, tmp_path):
    text = ", ".join(f"{key}={value}" for key, value in options.items())
    config = settings(name, tmp_path, optim_args=text)
    if name == "adamw":  # the name is this package's
        name = "adamw_torch_fused"
    model = tiny_llama() if whole else add_adapter(tiny_llama(), config)
    common = {"use_cpu": True, "report_to": "none", **SETTINGS}
    arguments = TrainingArguments(str(tmp_path), optim=name, optim_args=text or None, **common)
    theirs = Trainer(model, arguments).create_optimizer()
    ours = OPTIMIZERS[config.optim].make(model, config)
    if isinstance(ours, FusedOptimizer):
        assert type(ours).__name__ == type(theirs).__name__
        for mine, other in zip(known(ours.param_groups, model), known(theirs.param_groups, model), strict=True):
            shared = {"params", "lr", "weight_decay", "betas", "eps"} & mine.keys()
            assert {key: mine[key] for key in shared} == {key: other[key] for key in shared}
        return
    assert type(ours) is type(theirs)
    assert ours.defaults == theirs.defaults
    assert known(ours.param_groups, model) == known(theirs.param_groups, model)


def test_norms_and_biases_do_not_decay():
    model = Model()
    decaying, others = known(parameter_groups(model, OptimizerSettings(weight_decay=0.1)), model)
    assert decaying == {"params": ["experts", "embed.weight", "up.weight", "scaled.weight"], "weight_decay": 0.1}
    assert others == {"params": ["up.bias", "norm.weight", "norm.bias"], "weight_decay": 0.0}


STORED = [(name, storage) for name in ("adamw", "lamb", "lars", "ademamix", "lion_8bit", "rmsprop_bnb")
          for storage in OPTIMIZERS[name].options["storage"].choices]  # fmt: skip
BITS = [("adamw", 16), ("adamw_8bit", 32), ("lion_32bit", {"*": 8, "embed*": 16, "scaled.weight": 8}),
        ("adamw_8bit", {"embed*": 8, "up.*": 16}), ("paged_adamw_8bit", {"experts": 32})]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *[(name, {}) for name in OTHERS], *OPTIONS.items(),
        *[(name, {"storage": storage}) for name, storage in STORED],
        *[("paged_adamw_32bit", {"storage": storage}) for storage in ("bf16", "companded8")],
    ],
)  # fmt: skip
def test_state_bytes_match_the_row(name, options, tmp_path):
    state_bytes_match(name, settings(name, tmp_path, optim_args=options))


@pytest.mark.parametrize(("name", "bits"), BITS)
def test_state_bytes_match_the_bits_of_patterns(name, bits, tmp_path):
    state_bytes_match(name, settings(name, tmp_path, optim_bits=bits))


def state_bytes_match(name, config):
    model = Model()
    optimizer = OPTIMIZERS[name].make(model, config)
    for parameter in trained_parameters(model).values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    row = OPTIMIZERS[name]
    if row.host_bytes is not None:
        held = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert row.host_bytes(model, config) == sum(value.nbytes for value in held)
        windows = sum(windows.nbytes for windows in optimizer._windows.values())
        assert windows <= row.state_bytes(model, config) * 1.001
        assert windows >= row.state_bytes(model, config) / 2  # launches share two buffers
        return
    kept = [value for state in optimizer.state.values() for key, value in state.items() if not key.startswith("qmap")]
    measured = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.dim())
    assert OPTIMIZERS[name].state_bytes(model, config) == measured
    with torch.device("meta"):
        assert OPTIMIZERS[name].state_bytes(Model(), config) == measured


@pytest.mark.parametrize("name", [*OWN, *OTHERS])
def test_capabilities_match_the_optimizer(name, tmp_path):
    row = OPTIMIZERS[name]
    optimizer = row.make(Model(), settings(name, tmp_path))
    assert row.guarded == getattr(optimizer, "_step_supports_amp_scaling", False)  # the protocol of GradScaler
    offloaded = [group.get("offload", False) for group in optimizer.param_groups]
    assert (row.host_bytes is not None) == all(offloaded) == any(offloaded)
    assert row.capturable == (all("capturable" in group for group in optimizer.param_groups) and not any(offloaded))
    assert type(optimizer).__module__.partition(".")[0] in ("torch", "transformers", "halfbyte")


def test_options_of_the_storage_are_those_of_the_rules():
    for kind, known in STORAGES.items():
        assert known == RULES[getattr(fused, kind).rule].storages
    assert {*STORAGE_OF_BITS.values()} < {*state_storages}
    assert OPTIMIZERS["adamw"].options["rounding"].choices == ROUNDINGS
    for storage, block in SLICED.items():
        assert block == 1 or block % state_storages[storage].block == 0


@pytest.mark.parametrize(("bits", "expected"), [
    (None, {"embed.weight": 32, "up.weight": 8, "experts": 8, "norm.weight": 32}),
    ({"*": 32, "experts": 8}, {"embed.weight": 32, "up.weight": 32, "experts": 8}),
    ({"experts": 8, "*": 32}, {"embed.weight": 32, "up.weight": 32, "experts": 32}),
    ({"embed.*": 8, "up.weight": 16, "norm.weight": 8}, {"embed.weight": 8, "up.weight": 16, "norm.weight": 32}),
    (16, {"embed.weight": 16, "up.weight": 16, "experts": 16}),
])  # fmt: skip
def test_bits_of_patterns(bits, expected, tmp_path):
    """The last pattern that matches decides; small parameters have fp32 state in place of codes with scales."""
    model, config = Model(), settings("adamw_8bit", tmp_path, optim_bits=bits)
    optimizer = OPTIMIZERS["adamw_8bit"].make(model, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(weight)]: optimizer.storage_of(group, index).name
        for group in optimizer.param_groups
        for index, weight in enumerate(group["params"])
    }
    assert found.keys() == trained_parameters(model).keys()
    assert {name: found[name] for name in expected} == {name: STORAGE_OF_BITS[each] for name, each in expected.items()}
    decays = {
        names[id(weight)] for group in optimizer.param_groups if group["weight_decay"] for weight in group["params"]
    }
    assert decays == {"embed.weight", "up.weight", "scaled.weight", "experts"}


@pytest.mark.parametrize(("name", "options", "bits", "block"), [
    ("adamw", {}, None, 1), ("adamw_8bit", {}, None, 256), ("adamw_8bit", {"storage": "fp32"}, None, 1),
    ("adamw", {"storage": "companded8"}, None, 256), ("adamw", {}, {"*": 8}, 256), ("adamw_8bit", {}, {"*x*": 16}, 256),
    ("lamb", {}, None, 1), ("lars", {}, {"*": 8}, 256),
])  # fmt: skip
def test_slices_are_cut_at_the_blocks_of_all_storages(name, options, bits, block):
    assert OPTIMIZERS[name].block_of(OptimizerSettings(optim=name, optim_args=options, optim_bits=bits)) == block


def test_config_takes_the_rows_and_nothing_else():
    keys = {"model_name_or_path": "m", "dataset": "d"}
    for name in OPTIMIZERS:
        layerwise = {"max_grad_norm": 0.0} if name in LAYERWISE else {}
        assert load_config(None, keys | {"optim": name} | layerwise).optim == name
    with pytest.raises(ConfigError, match=f"{', '.join(OPTIMIZERS)}.*'adamw_of_nobody'"):
        load_config(None, keys | {"optim": "adamw_of_nobody"})


class Signed(torch.optim.Optimizer):
    """Steps of a fixed size against the sign of a running sum of gradients."""

    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                total = state["sum"] = state.get("sum", 0) + parameter.grad
                parameter -= group["lr"] * (total.sign() + group["weight_decay"] * parameter)


@pytest.fixture
def signed(monkeypatch):
    """The name of a row that this test adds."""
    row = Optimizer(
        make=lambda model, settings: Signed(parameter_groups(model, settings), settings.learning_rate),
        state_bytes=lambda model, settings: sum(parameter.nbytes for parameter in trained_parameters(model).values()),
    )
    monkeypatch.setitem(OPTIMIZERS, "signed", row)
    return "signed"


def test_an_optimizer_is_one_row(signed, tmp_path):
    """An added optimizer trains, resumes and is planned for, from Python and from the command line."""
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}
    model = str(write_model(tmp_path / "model", tiny_llama(**tokens)))
    data = str(write_rows(tmp_path / "rows.jsonl", [20, 60, 30, 40] * 4))
    keys = {"device": "cpu", "dtype": "float32", "r": 4, "learning_rate": 1e-3, "sample_prompts": 0, "optim": signed}
    keys |= {"max_steps": 4, "save_steps": 2, "lr_scheduler_type": "constant", "eval_split_size": 0.0}
    first = finetune(model, data, **keys, output_dir=str(tmp_path / "first"))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "first/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    planned = json.loads((tmp_path / "first/memory.json").read_text())["predicted"]
    assert planned["optimizer"] == planned["adapters"]

    config = tmp_path / "second.yaml"
    config.write_text(dump_config(load_config(None, keys | {"model_name_or_path": model, "dataset": data})))
    second = tmp_path / "second"
    for more in ([], ["--resume"]):
        shutil.rmtree(second / "checkpoint-4", ignore_errors=True)
        result = CliRunner().invoke(app, ["train", str(config), f"output_dir={second}", *more])
        assert result.exit_code == 0, result.output
    weights = [(folder / "adapter/adapter_model.safetensors").read_bytes() for folder in (first.output_dir, second)]
    assert weights[0] == weights[1]
