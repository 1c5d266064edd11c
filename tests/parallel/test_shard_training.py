"""Runs with sharded frozen weights equal the run of one process."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from halfbyte.parallel.shard import optimizer as shard_optimizers
from tests.helpers.rank_runs import VOCABULARY, run, write_place

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=4, save_steps=2)


def optimizer_of(checkpoint):
    return torch.load(checkpoint / "optimizer.pt", map_location="cpu")


def test_sharded_run_equals_one_process(place, alone, two, tmp_path):
    """One process resumes from the ranks' checkpoint."""
    keys = {"gradient_accumulation_steps": 2, "save_steps": 2, "parallel": {"shard": 2}}
    found = run(two, place, tmp_path / "out", **keys)
    found.same_as(alone)
    assert 0 < found.trained[0]["gather_share"] < 1
    assert ["gather_share" in record for record in found.trained] == [True, False, False, False, False]
    assert json.loads((found.folder / "checks.json").read_text())["adapter_reload"]["equal"]
    mine, theirs = (optimizer_of(each.folder / "checkpoint-4") for each in (found, alone))
    assert mine["param_groups"] == theirs["param_groups"]
    for number, state in theirs["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(mine["state"][number][key], value, rtol=1e-4, atol=1e-8)
    keys = {"gradient_accumulation_steps": 4, "save_steps": 2}
    copied = copied_to(tmp_path / "one", found.folder)
    run(None, place, copied, resume=str(copied / "checkpoint-4"), **keys).same_as(alone)


@pytest.mark.slow
def test_two_ranks_resume_the_run_of_one_process(place, alone, two, tmp_path):
    keys = {"gradient_accumulation_steps": 4, "save_steps": 2, "parallel": {"shard": 2}}
    copied = copied_to(tmp_path / "two", alone.folder)
    run(two, place, copied, resume=str(copied / "checkpoint-4"), **keys).same_as(alone)


@pytest.mark.slow
def test_sharded_experts_and_adapters(two, tmp_path):
    """PEFT sizes the adapter of a stack by the stack's shape, of which a rank may hold a shard."""
    place = write_place(tmp_path)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, pad_token_id=1, eos_token_id=0, bos_token_id=None))
    model.to(torch.bfloat16).save_pretrained(place / "model")
    keys = {"max_steps": 2, "sample_prompts": 0, "router_aux_loss_coef": 0.01}
    alone = run(None, place, tmp_path / "alone", gradient_accumulation_steps=2, **keys)
    found = run(two, place, tmp_path / "out", gradient_accumulation_steps=1, parallel={"shard": 2}, **keys)
    found.same_as(alone)
    one, both = (json.loads((each.folder / "experts.json").read_text()) for each in (alone, found))
    assert one == both  # the tokens of both processes


def copied_to(folder, run):
    """Copy a run that stopped after its fourth step."""
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("adapter", "model", "checkpoint-5", ".lock"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_weights_trained(place, two, tmp_path, at_once):
    """Weights are replicated and stepped in shards; one process resumes the run."""
    keys = {"use_peft": False, "load_in_4bit": False, "save_steps": 2, "learning_rate": 1e-3}
    one = run(None, place, tmp_path / "one", gradient_accumulation_steps=4, **keys)
    here = {"gradient_accumulation_steps": 2, "parallel": {"shard": 2}}
    two.run(reduces_at_once, at_once)
    found = run(two, place, tmp_path / "two", **keys, **here)
    two.run(reduces_at_once, False)
    found.same_as(one)
    assert json.loads((found.folder / "checks.json").read_text())["model_reload"]["equal"]
    copied = copied_to(tmp_path / "again", found.folder)
    run(None, place, copied, resume=str(copied / "checkpoint-4"), gradient_accumulation_steps=4, **keys).same_as(one)


def reduces_at_once(mesh, at_once):
    """Reduce gradients in each backward, however few there are."""
    shard_optimizers.AT_ONCE = 0 if at_once else 2**29


@pytest.mark.slow
def test_full_factors_are_16_bit_only(place, two, tmp_path):
    """Only the casts of factors are full; checkpoints hold full precision, and resuming is exact."""
    keys = {"dtype": "bfloat16", "save_steps": 2, "lora_dropout": 0.0}
    one = run(None, place, tmp_path / "one", gradient_accumulation_steps=4, **keys)
    keys |= {"gradient_accumulation_steps": 2, "parallel": {"shard": 2}}
    found = run(two, place, tmp_path / "two", **keys)
    found.same_as(one, loss=1e-3, weights=0.2)
    assert json.loads((found.folder / "checks.json").read_text())["adapter_reload"]["equal"]
    assert any(not torch.equal(each, each.bfloat16().float()) for each in found.adapter.values())
    copied = copied_to(tmp_path / "again", found.folder)
    again = run(two, place, copied, resume=str(copied / "checkpoint-4"), **keys)
    again.same_as(found, loss=0.0, weights=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"parallel": {"shard": 2}, "dtype": "bfloat16"},  # full factors are 16-bit copies
        {"parallel": {"shard": 2}, "use_peft": False, "load_in_4bit": False},
        {"parallel": {"data": 2}},
        {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2},
        {"parallel": {"tensor": 2}, "load_in_4bit": False},
    ],
    ids=["shard", "full", "data", "pipeline", "tensor"],
)
def test_ranks_end_with_the_weights_of_the_best_evaluation(place, two, tmp_path, keys):
    """A learning rate that is much too high: later evaluations are worse, and training stops."""
    more = {"load_best_model_at_end": True, "eval_steps": 1, "save_total_limit": 1, "early_stopping_patience": 2}
    more |= {"learning_rate": 0.5, "max_steps": 8, "sample_prompts": 0, "lr_scheduler_type": "constant"}
    left = run(two, place, tmp_path / "out", **more | keys)
    best = json.loads((left.folder / "environment.json").read_text())["best"]
    assert best["loaded"]
    assert best["step"] < (best["stopped"] or 8)
    checkpoint = left.folder / f"checkpoint-{best['step']}"
    saved = load_file(next(checkpoint.glob("*model.safetensors")))
    assert left.adapter.keys() == saved.keys()
    assert all(torch.equal(left.adapter[name], saved[name].to(left.adapter[name].dtype)) for name in saved)
