"""Pipeline stages: losses, gradients and adapters equal those of one process."""

from __future__ import annotations

import contextlib
import re
import shutil

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.mesh.reduction import clip_gradients, sum_gradients
from halfbyte.methods import METHODS
from halfbyte.modeling.head import Head, set_verified_head
from halfbyte.modeling.patch import patch
from halfbyte.optim import trained_parameters
from halfbyte.parallel.pipeline import runtime as pipelines
from halfbyte.parallel.pipeline.model import LocalStages, PipelinePartition, check_stages, check_trained, layer_seconds
from halfbyte.parallel.pipeline.partition import partition_layers, stage_seconds
from halfbyte.parallel.pipeline.runtime import Pipeline
from halfbyte.parallel.pipeline.schedules import Schedule, Seconds
from halfbyte.train.pipeline_stepper import PipelinedStepper
from halfbyte.train.stepper import Stepper
from halfbyte.utils.errors import HalfbyteError, ModelError
from tests.helpers import rank_runs
from tests.helpers.steps import run_step

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
HEAVY = 16_384  # tokens: head and loss take longer than all layers, and have the last stage alone
WIDTHS = (12, 7, 9, 12, 5, 12, 8, 3)


def model_of(family="Llama", layers=8, **keys) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | {"num_hidden_layers": layers} | keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


def batches_of(number: int, seed: int = 0) -> list[dict]:
    """Return micro-batches of different widths; every other one packs two documents per sequence."""
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


def sums_of(model):
    return lambda batch: SFT.sums(model, batch)


def three_steps(stepper, model, window, mesh=SINGLE_PROCESS):
    """Return sums, gradients and weights of three steps of `window` micro-batches, the last one incomplete."""
    trained = trained_parameters(model)
    found = []
    for number, size in enumerate((window, window, max(window - 3, 1))):
        batches = batches_of(size, seed=number)
        sums = sum_gradients(mesh, [*trained.values()], run_step(stepper, sums_of(model), batches, count_of(batches)))
        loss = float(sums[0]) / float(count_of(batches))
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        clip_gradients(mesh, [*trained.values()], 0.1)
        for parameter in trained.values():
            parameter.data.sub_(0.5 * parameter.grad)
            parameter.grad = None
        found.append((loss, gradients))
    with torch.no_grad():
        held_out = [float(sums["loss"]) for sums in stepper.evaluate(sums_of(model), batches_of(3, seed=9))]
    return found, held_out, {name: p.detach().clone() for name, p in trained.items()}


def whole(family, keys, layers, window, activations):
    model = model_of(family, layers, **keys)
    if activations is not None:
        patch(model, activations)
    return three_steps(Stepper(), model, window)


def in_stages(mesh, name, chunks, family, keys, layers, window, activations, ahead):
    model = model_of(family, layers, **keys)
    schedule = Schedule(name, mesh.degree("pipeline"), chunks)
    seconds, end = layer_seconds(model, recomputed=activations is not None)
    parts = partition_layers(schedule, seconds, end)
    assert bool(parts[-1]) == (keys.get("vocab_size") != HEAVY)
    head = check_stages(model, head_alone=not parts[-1])
    how = {"width": SHAPE["hidden_size"], "dtype": torch.float32, "device": torch.device("cpu"), "ahead": ahead}
    pipeline = Pipeline(mesh, schedule, stage_seconds(parts, seconds, end), **how)
    set_verified_head(model, head)
    stages = LocalStages(model, parts, pipeline.local_stages)
    if activations is not None:
        patch(model, activations)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    stepper = PipelinedStepper(["loss"], SFT.blank, contextlib.nullcontext, pipeline, stages, scaler)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-1p", 2), ("zb-v", 2)])
def test_two_processes_equal_one(two, name, chunks):
    check(two, name, chunks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunks", "window"), [("1f1b", 1, 4), ("interleaved", 2, 8), ("zb-1p", 2, 4), ("zb-v", 2, 8)]
)
def test_four_processes_equal_one(four, name, chunks, window):
    check(four, name, chunks, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "ahead"), [("checkpoint", 1), ("checkpoint", 99), ("recompute_mlp", 99)])
def test_recomputation_before_the_gradient_arrives(two, level, ahead):
    """Some or all layers of a stage of a patched model are recomputed before the gradient arrives."""
    check(two, "interleaved", 2, activations=level, ahead=ahead)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("family", "keys", "patched"),
    [
        ("Gemma2", {"sliding_window": 4, "final_logit_softcapping": 5.0}, False),  # two kinds of layers, a tied head
        ("Gemma2", {"sliding_window": 4}, True),
        ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}, False),
        ("Qwen3", {"tie_word_embeddings": True}, True),
    ],
)
def test_families_equal_one_process(two, family, keys, patched):
    check(two, "zb-v", 2, family=family, keys=keys, layers=4, activations="checkpoint" if patched else None, ahead=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "family", "patched"),
    [("interleaved", "Llama", False), ("zb-1p", "Llama", True), ("zb-v", "Gemma2", False), ("zb-v", "Qwen3", True)],
)
def test_last_stage_with_head_only(two, name, family, patched):
    keys = {"vocab_size": HEAVY}
    check(two, name, 2, family=family, keys=keys, layers=4, activations="checkpoint" if patched else None, ahead=1)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return rank_runs.write_place(tmp_path_factory.mktemp("place"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return rank_runs.run(None, place, tmp_path_factory.mktemp("alone"), gradient_accumulation_steps=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_pipeline_run_equals_one_process(two, place, alone, tmp_path, name):
    """Losses, adapter and answers of a full run with `parallel: {pipeline: 2}` equal those of one process."""
    keys = {"parallel": {"pipeline": 2}, "pipeline_schedule": name, "gradient_accumulation_steps": 4}
    found = rank_runs.run(two, place, tmp_path / "run", **keys)
    found.same_as(alone)
    assert 0 < found.trained[0]["idle_share"] < 1
    assert "idle_share" not in found.trained[1]


@pytest.mark.slow
@pytest.mark.parametrize("before", ["stages", "alone"])
def test_resume_with_and_without_stages(two, place, alone, tmp_path, before):
    """One process resumes a checkpoint of two stages, and two stages one of one process."""
    keys = {"gradient_accumulation_steps": 4, "save_steps": 2, "save_total_limit": None}
    stages = {"parallel": {"pipeline": 2}}
    first, then = (two, stages), (None, {})
    if before == "alone":
        first, then = then, first
    rank_runs.run(first[0], place, tmp_path / "run", **keys, **first[1])
    for name in ("checkpoint-4", "checkpoint-5", "adapter"):
        shutil.rmtree(tmp_path / "run" / name, ignore_errors=True)
    assert (tmp_path / "run" / "checkpoint-2").is_dir()
    left = rank_runs.run(then[0], place, tmp_path / "run", resume=True, **keys, **then[1])
    left.answers = alone.answers  # a resumed run answers before it, too
    left.same_as(alone)


def refused(mesh, place, output, keys):
    try:
        rank_runs.trains(mesh, place, output, keys, None)
    except HalfbyteError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, None),  # from full logits, in the last stage
        ({"gradient_accumulation_steps": 1}, "pipeline_schedule: 1f1b over 2 .* 1 micro-batches"),
        ({"target_modules": r".*layers\.[0-2]\..*q_proj"}, "layers 3 to 5 "),
    ],
)
def test_untrainable_stages_are_refused(two, place, tmp_path, keys, said):
    """The error names the key before anything is loaded or written, and a following run succeeds."""
    keys = {"parallel": {"pipeline": 2}, "pipeline_schedule": "1f1b", "max_steps": 1, "warmup_steps": 0, **keys}
    keys = {"gradient_accumulation_steps": 2, "eval_split_size": 0, "sample_prompts": 0} | keys
    if said is None:
        assert rank_runs.run(two, place, tmp_path / "run", **keys).trained
        return
    for error in two.run(refused, place, tmp_path / "run", keys):
        assert re.search(said, error)
        assert "fix: " in error
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_more_stages_than_layers_are_refused(four, tmp_path):
    place = rank_runs.write_place(tmp_path, num_hidden_layers=3)
    for error in four.run(refused, place, tmp_path / "run", {"parallel": {"pipeline": 4}}):
        assert re.search(r"parallel: 4 .*\b3\b", error)


def test_models_without_stages_are_refused():
    """A layer with state for later layers; a tied embedding that is trained."""
    with pytest.raises(ModelError, match="Gemma3nForCausalLM"):
        check_stages(transformers.AutoModelForCausalLM.from_config(transformers.Gemma3nTextConfig(**SHAPE | {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 96, "layer_types": None,
            "activation_sparsity_pattern": None, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16,
        })))  # fmt: skip
    model = model_of("Qwen3", 4, tie_word_embeddings=True)
    schedule = Schedule("1f1b", 2, 1)
    cut = PipelinePartition(schedule, (range(2), range(2, 4)), (Seconds(1, 1), Seconds(1, 1)), Head())
    check_trained(model, cut)
    model.get_input_embeddings().weight.requires_grad_(True)
    with pytest.raises(ModelError):
        check_trained(model, cut)


class Left:
    """Pending recomputation of a layer, without a layer."""


def test_recompute_ahead_fits_spare_memory(monkeypatch):
    """With 100 bytes per layer and token, 500 spare bytes and 2 tokens fit two layers after the first."""
    ran, held = [], [0]
    monkeypatch.setattr(pipelines, "run_ahead", lambda left: (ran.append(left), held.__setitem__(0, held[0] + 200)))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held[0])
    how = {"width": 4, "dtype": torch.float32, "device": torch.device("cpu"), "ahead": 9}
    line = Pipeline(SINGLE_PROCESS, Schedule("interleaved", 1, 2), [Seconds(1, 1)] * 2, **how, spare=500)
    layers = [Left() for _ in range(6)]
    line.recompute_ahead(layers, 2)
    assert ran == layers[:-2:-1]  # not known yet: the one that backward would run first
    ran.clear()
    line.recompute_ahead(layers, 2)
    assert ran == layers[:-4:-1]
    ran.clear()
    line.recompute_ahead(layers, 20)
    assert ran == layers[:-2:-1]
    unbounded = Pipeline(SINGLE_PROCESS, Schedule("interleaved", 1, 2), [Seconds(1, 1)] * 2, **how)
    ran.clear()
    unbounded.recompute_ahead(layers, 20)
    assert ran == layers[::-1]
