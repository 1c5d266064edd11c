"""Runs with low-rank and block-wise optimizers, LoRA+ and preconditioning: they train, resume exactly, are planned."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from halfbyte.config import Parallel, load_config
from halfbyte.memory import allocators
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.optim import OPTIMIZERS, optimizer_row
from halfbyte.runs import checkpoints
from halfbyte.train import preflight
from halfbyte.train.optimizer_checks import check_bits, check_host_state, check_loss_scale, check_targets
from halfbyte.train.preflight import prepare_run
from halfbyte.utils.errors import ConfigError, TrainingError
from tests.helpers.marks import slow_except
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows
from tests.helpers.sft_runs import keys as sft_keys
from tests.helpers.sft_runs import run
from tests.helpers.tiny_runs import losses, make_loop, run_config, tiny_llama

LOW_RANK = {"rank": 4, "update_proj_gap": 3}
CASES = {
    "galore_adamw": LOW_RANK,
    "galore_adamw_layerwise": LOW_RANK,
    "galore_adamw_8bit": LOW_RANK,
    "galore_adamw_8bit_layerwise": LOW_RANK,
    "q_galore_adamw8bit": LOW_RANK | {"queue_size": 1, "cos_threshold": 0.0},
    "apollo_adamw": LOW_RANK,
    "apollo_adamw_layerwise": LOW_RANK | {"proj": "svd"},
    "apollo_mini": {"update_proj_gap": 3, "scale": 1.0},
    "badam": {"badam_switch_interval": 3, "badam_switch_mode": "random"},
}


def keys(name, **changed):
    if OPTIMIZERS[name].package is not None:
        pytest.importorskip(OPTIMIZERS[name].package)
    layerwise = {"max_grad_norm": 0.0} if OPTIMIZERS[name].updates == "backward" else {}
    whole = {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0}
    return {"optim": name, "optim_args": CASES[name], "max_steps": 8, "save_steps": 2, **whole, **layerwise, **changed}


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(loop):
    return {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}


def resumed_equals_uninterrupted(tmp_path, config, step):
    """Train, then resume at `step` in another folder; returns the losses of the first run."""
    whole = make_loop(run_config(tmp_path / "whole", save_total_limit=None, **config))
    whole.train()
    again = make_loop(run_config(tmp_path / "again", save_total_limit=None, **config))
    again.train(tmp_path / "whole" / f"checkpoint-{step}")
    for name, value in trained(whole).items():
        assert torch.equal(again.model.get_parameter(name), value), name
    assert losses(again) == losses(whole)[step:]
    return losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_full_fine_tuning_resumes_bit_equal(name, tmp_path):
    resumed_equals_uninterrupted(tmp_path, keys(name), 4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw_layerwise", "badam"])
def test_adapters_train_and_resume_too(name, tmp_path):
    resumed_equals_uninterrupted(tmp_path, keys(name, use_peft=True, load_in_4bit=True, lora_dropout=0.1), 2)


@pytest.mark.parametrize("optim", slow_except(["adafactor", "adamw_torch", "adagrad"], ["adamw_torch"]))
def test_optimizers_of_other_packages_resume_bit_equal_in_bf16(optim, tmp_path):
    """torch's load_state_dict casts float32 state to the parameter's dtype."""
    adapters = {"adapter_dtype": "bfloat16", "load_in_4bit": False, "lora_dropout": 0.0}
    resumed_equals_uninterrupted(tmp_path, {"optim": optim, "max_steps": 6, "save_steps": 2, **adapters}, 4)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [
    {"loraplus_lr_ratio": 4.0}, {"lora_preconditioner": "riemannian"},
    {"embedding_learning_rate": 1e-3, "modules_to_save": ["lm_head"]},
    {"lora_fa": True, "lora_preconditioner": "riemannian", "layers_to_transform": [1]},
])  # fmt: skip
def test_groups_and_preconditioner_change_the_run_and_resume(changed, tmp_path):
    config = {"max_steps": 6, "save_steps": 2}
    common = {key: changed[key] for key in changed if key == "modules_to_save"}
    plain = make_loop(run_config(tmp_path / "plain", **config, **common))
    plain.train()
    found = resumed_equals_uninterrupted(tmp_path, config | changed, 4)
    assert found[0] == losses(plain)[0]
    assert found[2:] != losses(plain)[2:]


PLACES = {
    "in the backward": {"optim_in_backward": True},
    "offloaded": {"optim_offload": True},
    "both": {"optim_in_backward": True, "optim_offload": True},
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("optim", ["adamw", "lion_8bit"])
def test_updates_in_the_backward_and_offloaded_state_change_no_number(place, optim, tmp_path):
    whole = {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0, "max_grad_norm": 0.0, "max_steps": 6}
    config = {"optim": optim, "save_steps": 2, **whole}
    resident = make_loop(run_config(tmp_path / "resident", **config))
    resident.train()
    found = resumed_equals_uninterrupted(tmp_path, config | place, 4)
    assert found == losses(resident)
    again = trained(make_loop(run_config(tmp_path / "resident", **config)))
    assert any(not torch.equal(value, again[name]) for name, value in trained(resident).items())
    norms = [
        [record["grad_norm"] for record in records(tmp_path / name) if record["kind"] == "train"]
        for name in ("whole", "resident")
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    loop = make_loop(run_config(tmp_path / "other", **config))
    loop.train(tmp_path / "whole" / "checkpoint-4")  # files are the same for all places
    for name, value in trained(resident).items():
        assert torch.equal(loop.model.get_parameter(name), value), name


def tensors(saved):
    """Copies of the tensors of a state dict, in order."""
    if isinstance(saved, torch.Tensor):
        return [saved.clone()]
    return [found for each in saved.values() for found in tensors(each)] if isinstance(saved, dict) else []


FULL = {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0, "max_grad_norm": 0.0, "max_steps": 6}
BACKWARD = {
    "adamw": {"optim": "adamw", "optim_in_backward": True},
    "offloaded": {"optim": "adamw_8bit", "optim_in_backward": True, "optim_offload": True},
    "layerwise": {"optim": "galore_adamw_layerwise", "optim_args": LOW_RANK},
}
BROKEN = {  # beginnings of the names of parameters that the backward updates before the broken gradient
    "lm_head.weight": (),
    "model.layers.1.mlp.up_proj.weight": ("lm_head", "model.norm"),
    "model.layers.0.self_attn.q_proj.weight": ("lm_head", "model.norm", "model.layers.1"),
    "model.embed_tokens.weight": ("lm_head", "model.norm", "model.layers"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_gradient_stops_the_backwards_updates_and_is_named(broken, tmp_path):
    loop = make_loop(run_config(tmp_path, **FULL, **BACKWARD["adamw"]))
    before = {}

    def spoil(gradient):
        if loop.state.global_step != 3:
            return gradient
        return gradient * math.nan

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            before.update(trained(loop))

    loop.add_callback(Keep())
    loop.model.get_parameter(broken).register_hook(spoil)
    with pytest.raises(TrainingError, match=f"step 4: .*{re.escape(broken)}"):
        loop.train()
    assert loop.state.global_step == 3
    changed = {name for name, value in trained(loop).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if name.startswith(BROKEN[broken])}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("keys", BACKWARD.values(), ids=BACKWARD)
def test_a_broken_loss_updates_nothing_in_the_backward(keys, value, tmp_path):
    """Also if all gradients are finite."""
    loop = make_loop(run_config(tmp_path, **FULL, **keys))
    before, states, sums = {}, [], loop.sums

    def broken(batch):
        found = sums(batch)
        return found | {"loss": found["loss"] + (value if loop.state.global_step == 2 else 0.0)}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            before.update(trained(loop))
            states[:] = tensors(loop.optimizer.state_dict())

    loop.sums = broken
    loop.add_callback(Keep())
    with pytest.raises(TrainingError, match="step 3: "):
        loop.train()
    assert loop.state.global_step == 2
    assert all(torch.equal(each, before[name]) for name, each in trained(loop).items())
    assert len(states) > len(before)
    assert all(map(torch.equal, tensors(loop.optimizer.state_dict()), states))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw", "badam"])
def test_the_loss_falls_as_with_adamw(name, tmp_path):
    """On one batch that repeats; GaLore with full rank is AdamW in a rotated basis."""
    options = {"galore_adamw": {"rank": 32, "scale": 1.0}, "apollo_adamw": {"rank": 16}, "badam": {}}[name]
    config = keys(name, optim_args=options, learning_rate=3e-3, max_steps=25, save_steps=1000)
    config |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 12, "lr_scheduler_type": "constant"}
    loop = make_loop(run_config(tmp_path / "low", **config))
    loop.train()
    adamw = make_loop(run_config(tmp_path / "adamw", **config | {"optim": "adamw_torch_fused", "optim_args": {}}))
    adamw.train()
    fell, other = losses(loop)[0] - losses(loop)[-1], losses(adamw)[0] - losses(adamw)[-1]
    assert losses(loop)[0] == losses(adamw)[0]
    assert fell > (0.1 if name == "badam" else 0.5) * other


def test_layerwise_records_the_norm_of_all_gradients(tmp_path):
    norms = {}
    for name in ("galore_adamw", "galore_adamw_layerwise"):
        loop = make_loop(run_config(tmp_path / name, **keys(name, max_grad_norm=0.0, max_steps=1)))
        loop.train()
        (record,) = [each for each in loop.metrics.records() if each["kind"] == "train"]
        norms[name] = record["grad_norm"]
    assert norms["galore_adamw"] == pytest.approx(norms["galore_adamw_layerwise"], rel=1e-5)


@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw", "badam"])
def test_an_overflow_of_scaled_gradients_is_skipped(name, tmp_path):
    """fp16's loss scaler: the overflowing step leaves the weights, and the run goes on."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-20)
    loop = make_loop(run_config(tmp_path, **keys(name, max_steps=6)), scaler=scaler)
    before = trained(loop)
    loop.train()
    assert scaler.get_scale() < 2.0**127
    assert any(not torch.equal(value, before[name]) for name, value in trained(loop).items())
    assert all(value.isfinite().all() for value in trained(loop).values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}
    write_model(folder / "model", tiny_llama(**tokens))
    write_rows(folder / "data.jsonl", [20, 60, 30, 40] * 4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["galore_adamw", "apollo_adamw_layerwise", "badam"])
def test_a_whole_run_is_planned_and_resumes(name, place, tmp_path):
    config = keys(name, gradient_accumulation_steps=1, optim_args=CASES[name], sample_prompts=0, max_steps=4)
    run(place, tmp_path / "run", **config)
    memory = json.loads((tmp_path / "run/memory.json").read_text())["predicted"]
    settings = load_config(None, {"model_name_or_path": "m", "dataset": "d", **config})
    model = tiny_llama(vocab_size=VOCABULARY)
    row = OPTIMIZERS[name]
    assert memory["optimizer"] == row.state_bytes(model, settings) < 2 * memory["adapters"]
    if row.gradient_bytes is not None:
        assert memory["gradients"] == row.gradient_bytes(model, settings) < memory["adapters"]
    state = torch.load(checkpoints.checkpoints(tmp_path / "run")[-1] / "optimizer.pt", weights_only=True)
    assert state["steps"] == 4


def test_targets_that_select_nothing_are_refused(place, tmp_path):
    config = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu",
              "output_dir": str(tmp_path), "optim": "galore_adamw", "optim_target_modules": ["nowhere"],
              "use_peft": False, "load_in_4bit": False, "dtype": "float32"}  # fmt: skip
    with pytest.raises(ConfigError, match="optim_target_modules"):
        prepare_run(load_config(None, config))
    check_targets(load_config(None, config | {"optim_target_modules": ["mlp"]}), tiny_llama())


def test_a_pattern_of_bits_that_matches_nothing_is_refused(place, tmp_path):
    config = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu",
              "output_dir": str(tmp_path), "dtype": "float32",
              "optim_bits": {"*lora_A*": 8, "*embed_tokens*": 32}}  # fmt: skip
    with pytest.raises(ConfigError, match="optim_bits"):
        prepare_run(load_config(None, config))
    check_bits(load_config(None, config | {"optim_bits": {"*mlp*": 32}}), tiny_llama())


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    {"optim": "adamw", "optim_args": {"storage": "companded8"}, "optim_bits": {"*mlp*": 16, "*embed_tokens*": 8}},
    {"optim": "lamb"}, {"optim": "lars", "learning_rate": 1.0},
])  # fmt: skip
def test_fused_options_are_planned_and_resume(keys, place, tmp_path):
    config = keys | {"use_peft": False, "load_in_4bit": False, "lora_dropout": 0.0}
    resumed_equals_uninterrupted(tmp_path, config | {"max_steps": 6, "save_steps": 2}, 4)
    run(place, tmp_path / "run", **config, sample_prompts=0, max_steps=1, warmup_steps=0)
    memory = json.loads((tmp_path / "run/memory.json").read_text())["predicted"]
    settings = load_config(None, {"model_name_or_path": "m", "dataset": "d", **config})
    model = tiny_llama(vocab_size=VOCABULARY)
    assert memory["optimizer"] == OPTIMIZERS[keys["optim"]].state_bytes(model, settings)


def test_float16_that_the_device_chose_is_refused_for_layerwise():
    config = load_config(None, {"model_name_or_path": "m", "dataset": "d", **keys("galore_adamw_layerwise")})
    check_loss_scale(config, torch.bfloat16)
    with pytest.raises(ConfigError, match="galore_adamw_layerwise"):
        check_loss_scale(config, torch.float16)


CUDA, CPU = (SimpleNamespace(device=torch.device(kind), compute_dtype=torch.bfloat16) for kind in ("cuda", "cpu"))


@pytest.mark.parametrize(("layout", "divided"), [
    ({}, 1), ({"data": 4}, 1), ({"shard": 4}, 4), ({"data": 2, "shard": 2}, 2), ({"pipeline": 2, "data": 2}, 2),
    ("auto", 4),
])  # fmt: skip
@pytest.mark.parametrize(
    ("keys", "named"),
    [({"optim": "paged_adamw_32bit"}, "optim:"), ({"optim": "adamw", "optim_offload": True}, "optim_offload:")],
)
def test_state_that_host_memory_does_not_hold_is_refused(keys, named, layout, divided, monkeypatch):
    """The state of all ranks of the host counts; before the ranks are started, all of them."""
    model = nn.Linear(64, 128)
    settings = {"model_name_or_path": "m", "dataset": "d", **keys, "parallel": layout or {"data": 1}}
    config = load_config(None, settings)
    ranks = Parallel(data=4) if layout == "auto" else Parallel(**layout)
    needed = ranks.size * (optimizer_row(config).host_bytes(model, config) // divided)
    free = [needed]
    monkeypatch.setattr(allocators, "available_bytes", lambda: free[0])
    check_host_state(config, model, CUDA, SINGLE_PROCESS, ranks)
    free[0] = needed - 1
    check_host_state(config, model, CPU, SINGLE_PROCESS, ranks)
    with pytest.raises(ConfigError, match=f"^{named}"):
        check_host_state(config, model, CUDA, SINGLE_PROCESS, ranks)


def test_a_run_whose_ranks_pin_too_much_ends_before_its_data_is_read(place, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(preflight, "read_data", lambda *arguments: read.append(arguments))
    monkeypatch.setattr(preflight, "look_at_machine", lambda *_: SimpleNamespace(**vars(CUDA), facts={}))
    monkeypatch.setattr(preflight, "print_header", lambda *_: None)
    monkeypatch.setattr(preflight, "check_optimizer", lambda *_: None)  # it would need the GPU
    whole = {"use_peft": False, "load_in_4bit": False, "optim_offload": True, "parallel": {"data": 4}}
    config = load_config(None, sft_keys(place, tmp_path / "run", **whole))
    state = optimizer_row(config).host_bytes(tiny_llama(vocab_size=VOCABULARY), config)
    monkeypatch.setattr(allocators, "available_bytes", lambda: 4 * state - 1)
    with pytest.raises(ConfigError, match=r"^optim_offload:"):
        prepare_run(config, layout=Parallel(data=4))
    assert not read
