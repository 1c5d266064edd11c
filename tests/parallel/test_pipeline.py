"""A model in stages: losses, gradients and adapters are those of one process."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch
import transformers
import whole as whole_runs
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.methods import METHODS
from halfbyte.models.patch import patch
from halfbyte.models.stages import Stages, check_stages, layer_seconds
from halfbyte.optim import trained_parameters
from halfbyte.parallel import ALONE, clip_gradients, sum_gradients
from halfbyte.parallel.pipeline import Pipeline
from halfbyte.parallel.schedules import Schedule, cut_layers, stage_seconds
from halfbyte.train.pipelined import PipelinedStepper
from halfbyte.train.stepper import Stepper

pytestmark = pytest.mark.dist

SFT = METHODS["sft"]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
WIDTHS = (12, 7, 9, 12, 5, 12, 8, 3)


def model_of(family="Llama", layers=8, **keys) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE, num_hidden_layers=layers, **keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def batches_of(number: int, seed: int = 0) -> list[dict]:
    """Of differing widths; every other one holds two documents a row."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        width = WIDTHS[index % len(WIDTHS)]
        ids = torch.randint(1, 97, (2, width), generator=generator)
        labels = ids.where(torch.rand(ids.shape, generator=generator) < 0.6, -100)
        positions = torch.arange(width) % (width - width // 3) if index % 2 else torch.arange(width)
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions.expand(2, -1).contiguous()})
    return found


def count_of(batches) -> torch.Tensor:
    return torch.tensor(float(sum(SFT.counts(batch)["trained_tokens"] for batch in batches)))


def three_steps(stepper, model, window, mesh=ALONE):
    """Windows of `window` micro-batches, the last one incomplete: sums, gradients and weights of three steps."""
    trained = trained_parameters(model)
    found = []
    for number, size in enumerate((window, window, max(window - 3, 1))):
        batches = batches_of(size, seed=number)
        sums = sum_gradients(mesh, [*trained.values()], stepper(batches, count_of(batches)))
        loss = float(sums[0]) / float(count_of(batches))
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        clip_gradients(mesh, [*trained.values()], 0.1)
        for parameter in trained.values():
            parameter.data.sub_(0.5 * parameter.grad)
            parameter.grad = None
        found.append((loss, gradients))
    with torch.no_grad():
        held_out = [float(sums["loss"]) for sums in stepper.evaluate(batches_of(3, seed=9))]
    return found, held_out, {name: p.detach().clone() for name, p in trained.items()}


def whole(family, keys, layers, window, activations):
    model = model_of(family, layers, **keys)
    if activations is not None:
        patch(model, activations)
    return three_steps(Stepper(lambda batch: SFT.sums(model, batch)), model, window)


def in_stages(mesh, name, chunks, family, keys, layers, window, activations, ahead):
    model = model_of(family, layers, **keys)
    check_stages(model)
    schedule = Schedule(name, mesh.ways("pipeline"), chunks)
    seconds, head = layer_seconds(model, recomputed=activations is not None)
    parts = cut_layers(schedule, seconds, head)
    how = {"width": SHAPE["hidden_size"], "dtype": torch.float32, "device": torch.device("cpu"), "ahead": ahead}
    pipeline = Pipeline(mesh, schedule, [stage_seconds(part, seconds, head) for part in parts], **how)
    stages = Stages(model, parts, pipeline.own)
    if activations is not None:
        patch(model, activations)
    stepper = PipelinedStepper(
        lambda batch: SFT.sums(model, batch), ["loss"], SFT.blank, contextlib.nullcontext, pipeline, stages
    )
    return three_steps(stepper, model, window, mesh)


def check(ranks, name, chunks, *, family="Llama", keys=None, layers=8, window=4, activations=None, ahead=0):
    keys = keys or {}
    expected, held_out, weights = whole(family, keys, layers, window, activations)
    found = ranks.run(
        in_stages, name, chunks, family, keys, layers, window, activations, ahead, layout={"pipeline": ranks.size}
    )
    for step, (loss, gradients) in enumerate(expected):
        together = {}
        for rank in found:
            assert rank[0][step][0] == pytest.approx(loss, rel=1e-6)
            assert not together.keys() & rank[0][step][1].keys()
            together |= rank[0][step][1]
        assert together.keys() == gradients.keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(together[key], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))
    after = {}
    for rank in found:
        assert rank[1] == pytest.approx(held_out, rel=1e-6)
        after |= rank[2]
    for key, weight in weights.items():
        torch.testing.assert_close(after[key], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-1p", 2), ("zb-v", 2)])
def test_two_processes(two, name, chunks):
    check(two, name, chunks)


@pytest.mark.parametrize(
    ("name", "chunks", "window"), [("1f1b", 1, 4), ("interleaved", 2, 8), ("zb-1p", 2, 4), ("zb-v", 2, 8)]
)
def test_four_processes(four, name, chunks, window):
    check(four, name, chunks, window=window)


@pytest.mark.parametrize("level", ["checkpoint", "recompute_mlp", "recompute"])
@pytest.mark.parametrize("ahead", [1, 99])
def test_recomputing_ahead_of_the_gradient(two, level, ahead):
    """In a patched model, some of a stage's layers or all, before the gradient is there."""
    check(two, "interleaved", 2, activations=level, ahead=ahead)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Gemma2", {"sliding_window": 4, "final_logit_softcapping": 5.0}),  # two kinds of layers, a tied head
        ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}),
        ("Qwen3", {"tie_word_embeddings": True}),
    ],
)
@pytest.mark.parametrize("patched", [False, True])
def test_families(two, family, keys, patched):
    check(two, "zb-v", 2, family=family, keys=keys, layers=4, activations="checkpoint" if patched else None, ahead=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return whole_runs.write_place(tmp_path_factory.mktemp("place"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return whole_runs.run(None, place, tmp_path_factory.mktemp("alone"), gradient_accumulation_steps=4)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_a_run_in_stages(two, place, alone, tmp_path, name):
    """From `parallel: {pipeline: 2}` to a finished folder: losses, adapter and answers are one process's."""
    keys = {"parallel": {"pipeline": 2}, "pipeline_schedule": name, "gradient_accumulation_steps": 4}
    whole_runs.run(two, place, tmp_path / "run", **keys).same_as(alone)


@pytest.mark.parametrize("before", ["stages", "alone"])
def test_resume_with_and_without_stages(two, place, alone, tmp_path, before):
    """A checkpoint of two processes is taken by one, and one's by two: the run is the same."""
    keys = {"gradient_accumulation_steps": 4, "save_steps": 2, "save_total_limit": None}
    stages = {"parallel": {"pipeline": 2}}
    first, then = (two, stages), (None, {})
    if before == "alone":
        first, then = then, first
    whole_runs.run(first[0], place, tmp_path / "run", **keys, **first[1])
    for name in ("checkpoint-4", "checkpoint-5", "adapter"):
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    left = whole_runs.run(then[0], place, tmp_path / "run", resume=True, **keys, **then[1])
    left.answers = alone.answers  # a resumed run answers before it, too
    left.same_as(alone)
