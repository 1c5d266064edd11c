"""Runs on images whose steps are CUDA graphs of the language model: they equal eager runs, and one graph replays
batches with different images. On a stand-in for CUDA graphs, and on a GPU."""

import json

import pytest
import torch

from halfbyte.config import load_config
from halfbyte.data import collate
from halfbyte.data.prepare import prepare
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.modeling.language_inputs import DEEPSTACK, LanguageInputs
from halfbyte.modeling.vision import bind_vision
from halfbyte.optim import trained_parameters
from halfbyte.plan import shapes
from halfbyte.train import graph
from halfbyte.train import run as runs
from halfbyte.train.run import train
from halfbyte.train.stepper import GraphedStepper, Stepper
from halfbyte.train.verify import split_check
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.helpers.graph_stand_in import StandIn
from tests.helpers.image_models import save_image_model, write_image_rows
from tests.methods.test_image_rows import write_pairs, write_prompts

PACKED = {"packing": True, "max_length": 200, "per_device_train_batch_size": 1}

POLICY = {"method": "grpo", "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 5,
          "reward_funcs": [{"regex": "[a-m]"}], "num_iterations": 2}  # fmt: skip
CACHED = {"vision_cache": True, "gradient_accumulation_steps": 2, "lora_dropout": 0.1}


def configured(folder, output, **keys):
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "max_steps": 7,
            "output_dir": str(output), "device": "cpu", "dtype": "float32", "max_length": 400, "r": 4,
            "learning_rate": 1e-2, "per_device_train_batch_size": 2, "logging_steps": 1, "load_in_4bit": False,
            "vision_cache": False, "sample_prompts": 0} | keys  # fmt: skip
    return load_config(None, keys)


def run(folder, output, **keys):
    """Train on rows with none to several images; return the losses and the norms of gradients."""
    reset_notices()
    train(configured(folder, output, **keys))
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if record["kind"] == "train" for name in ("loss", "grad_norm")]


def write_place(folder, name, dtype=torch.float32, method="sft"):
    save_image_model(folder / "model", name, dtype)
    {"sft": write_image_rows, "dpo": write_pairs, "grpo": write_prompts}[method](folder)
    return folder


def image_counts(monkeypatch):
    """Return, for each micro-batch of the next runs, its number of images."""
    counts, call = [], LanguageInputs.__call__

    def counted(self, batch, forward):
        counts.append(len(batch.get("image_grid_thw", batch.get("pixel_values", ()))))
        return call(self, batch, forward)

    monkeypatch.setattr(LanguageInputs, "__call__", counted)
    return counts


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("qwen3_vl", {}),
        ("qwen2_5_vl", PACKED),
        pytest.param("qwen2_5_vl", CACHED, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", {"method": "dpo"}, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", POLICY, marks=pytest.mark.slow),
        pytest.param("llava", {"neftune_noise_alpha": 5.0}, marks=pytest.mark.slow),
    ],
)
def test_runs_with_graphs_equal_eager_ones(name, keys, tmp_path, monkeypatch):
    place = write_place(tmp_path, name, method=keys.get("method", "sft"))
    for module in (collate, runs):
        monkeypatch.setattr(module, "rounds_widths", lambda device: True)
    keys |= {"optim": "adamw_torch"}  # whose steps are not captured
    eager = run(place, tmp_path / "eager", **keys)
    stand_in, captures = StandIn().install(monkeypatch), []
    capture = stand_in.captured

    def captured(step, batch, stream, pool):
        replayed = capture(step, batch, stream, pool)
        captures.append(batch)
        return replayed

    def graphed(run, model, verified):
        bind_vision(model)
        stepper = GraphedStepper(list(trained_parameters(model).values()), language_inputs=LanguageInputs(model))
        stand_in.graphs, stand_in.gradients = stepper.graphs, stepper.graphs.gradients
        return stepper

    monkeypatch.setattr(graph, "_Captured", captured)
    monkeypatch.setattr("halfbyte.train.setup.make_stepper", graphed)
    counts = image_counts(monkeypatch)
    assert run(place, tmp_path / "graphed", **keys) == pytest.approx(eager, rel=1e-5)
    assert len(set(counts)) > 1
    names = ("input_ids", "head_rows", "at", "language_model['max_length_q']")  # these do not depend on images
    shapes = [tuple(getattr(batch.get(name), "shape", batch.get(name)) for name in names) for batch in captures]
    assert 0 < len(set(shapes)) == len(captures)
    assert not any("pixel_values" in batch for batch in captures)


def test_a_model_whose_forward_in_two_parts_differs_runs_eagerly(tmp_path, monkeypatch):
    model = save_image_model(tmp_path / "model", "qwen3_vl")
    write_image_rows(tmp_path)
    bind_vision(model)
    config = configured(tmp_path, tmp_path / "out")
    tokenizer = load_run_tokenizer(config)
    batch = collate.make_collator(config, tokenizer)(list(prepare(config, tokenizer).train)[1:3])
    language_inputs, checked = split_check(model, batch, torch.float32)
    assert language_inputs is not None
    assert checked["difference"] == 0
    monkeypatch.setattr(LanguageInputs, "_uniform", lambda self, arguments: arguments | {DEEPSTACK: None})
    assert split_check(model, batch, torch.float32)[0] is None
    assert "image-graphs" in notices_so_far()


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [{}, PACKED, {"method": "dpo"}], ids=["padded", "packed", "pairs"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "mistral3", "gemma3"])
def test_graphs_replay_the_language_model_on_a_gpu(name, keys, tmp_path, monkeypatch):
    """Losses and gradients with and without graphs are equal up to rounding, at a rate that does not amplify it."""
    monkeypatch.setattr(shapes, "CONFIRMED", {name})
    place = write_place(tmp_path, name, torch.bfloat16, keys.get("method", "sft"))
    keys = {"device": "cuda", "dtype": "bfloat16", "max_steps": 12, "load_in_4bit": True} | keys
    keys |= {"learning_rate": 1e-5}
    replays, replay = [], graph._Captured.replay

    def counted(self, batch):
        replays.append(tuple(batch))
        return replay(self, batch)

    monkeypatch.setattr(graph._Captured, "replay", counted)
    counts = image_counts(monkeypatch)
    numbers = run(place, tmp_path / "graphs", **keys)
    assert notices_so_far().keys().isdisjoint({"cuda-graph", "image-graphs"})
    checks = json.loads((tmp_path / "graphs/checks.json").read_text())
    monkeypatch.setattr("halfbyte.train.setup.make_stepper", lambda run, model, verified: Stepper())
    expected = run(place, tmp_path / "eager", **keys)
    assert numbers == pytest.approx(expected, rel=3e-2)
    assert checks["split_forward"]["difference"] < 1e-2
    assert any("language_model['inputs_embeds']" in columns for columns in replays)
    assert len(set(counts)) > 1
