"""Distillation runs: the divergence falls, resuming is exact, and the plan counts the teacher."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, DataError
from tests.helpers.run_records import records_of

PT = {"format": "pt"}


@pytest.fixture(scope="module")
def taught(place, tmp_path_factory):
    """A folder with prompts; teachers `other`, with its own weights, and `adapter`, on the weights of `model`."""
    folder = tmp_path_factory.mktemp("taught")
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    shutil.copytree(place / "model", folder / "model")
    weights = load_file(folder / "model/model.safetensors")
    weights["lm_head.weight"] *= 15  # a confident model, which training can change
    save_file(weights, folder / "model/model.safetensors", PT)
    drawn = torch.Generator().manual_seed(0)
    shutil.copytree(folder / "model", folder / "other")
    other = {name: w + 0.5 * w.std() * torch.randn(w.shape, generator=drawn).to(w) for name, w in weights.items()}
    save_file(other, folder / "other/model.safetensors", PT)
    run(folder, folder / "first", method="sft", dataset=str(place / "data.jsonl"), max_steps=6, max_length=64)
    shutil.copytree(folder / "first/adapter", folder / "adapter")
    return folder


def run(taught, output, resume=None, **more):
    return train(load_config(None, keys(taught, output, **more)), resume=resume)


def keys(taught, output, **more):
    found = {"model_name_or_path": str(taught / "model"), "dataset": str(taught / "prompts.jsonl")}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "r": 4}
    found |= {"learning_rate": 2e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64}
    if more.get("method") != "sft":
        found |= {"method": "gkd", "max_completion_length": 8, "teacher_model_name_or_path": str(taught / "other")}
    return found | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | more


def divergence(folder, teacher, rows, beta):
    """Return TRL's loss of plain models over the answers of a step."""
    student = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    total, count = 0.0, 0
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = [model(ids).logits[:, :-1] for model in (student, teacher)]
            total += float(GKDTrainer.generalized_jsd_loss(*logits, labels[:, 1:], beta=beta, reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [pytest.param("other", 0.9, marks=pytest.mark.slow), ("adapter", 0.6)])
def test_the_divergence_from_the_teacher_falls(taught, tmp_path, kind, share):
    """With a separate model, and with an adapter on the trained weights; the first loss equals TRL's."""
    more = {"teacher_model_name_or_path": str(taught / kind), "max_steps": 16, "learning_rate": 5e-3}
    more |= {"eval_split_size": 4, "beta": 0.5, "save_steps": 1, "save_total_limit": 16}
    run(taught, tmp_path / "out", **more)
    found = records_of(tmp_path / "out")
    losses = [record["loss"] for record in found["train"]]
    assert sum(losses[-3:]) < share * sum(losses[:3])
    before, *_, after = found["eval"]
    assert after["loss"] < share * before["loss"]
    assert {"entropy", "completions/mean_length", "completions/clipped_ratio"} <= found["train"][
        0
    ].keys() & before.keys()
    teacher = AutoModelForCausalLM.from_pretrained(taught / ("model" if kind == "adapter" else kind), dtype="float32")
    if kind == "adapter":
        teacher = PeftModel.from_pretrained(teacher, taught / kind)
    rows = json.loads((tmp_path / "out/checkpoint-1/generation.json").read_text())["current"]["rows"]
    assert len(rows) == 8
    assert losses[0] == pytest.approx(divergence(taught, teacher, rows, 0.5), rel=1e-5)
    answers = [each for each in found["completions"] if each["step"] == 1]
    assert sum(each["tokens"] for each in answers) == found["train"][0]["trained_tokens"]
    assert {path.name for path in (tmp_path / "out/adapter").iterdir() if path.is_dir()} == set()
    assert "Divergence" in (tmp_path / "out/report.html").read_text()
    with pytest.raises(ConfigError):
        evaluate(str(tmp_path / "out"), str(taught / "prompts.jsonl"))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"prompt": "what is 1?", "n": 1}] * 8, None),
        (
            [{"prompt": "what is 1?", "completion": " 1"}] * 7 + [{"prompt": "a?", "completion": " "}],
            "prompt 8",
        ),
    ],
)
def test_missing_answers_in_the_data_are_refused(taught, tmp_path, rows, why):
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=why):
        prepare_run(load_config(None, keys(taught, tmp_path / "o", dataset=str(tmp_path / "some.jsonl"), lmbda=0.3)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [("adapter", "adapter_model.safetensors"), ("other", "model.safetensors")])
def test_resuming_with_a_changed_teacher_is_refused(taught, tmp_path, kind, file):
    shutil.copytree(taught / kind, tmp_path / "teacher")
    more = {"teacher_model_name_or_path": str(tmp_path / "teacher"), "save_steps": 1, "max_steps": 2}
    run(taught, tmp_path / "out", **more)
    shutil.copytree(tmp_path / "out", tmp_path / "same")
    run(taught, tmp_path / "same", resume=str(tmp_path / "same/checkpoint-1"), **more)
    path = tmp_path / "teacher" / file
    save_file({name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path, PT)
    with pytest.raises(ConfigError):
        run(taught, tmp_path / "out", resume=str(tmp_path / "out/checkpoint-1"), **more)


def test_the_plan_counts_the_teacher(taught, tmp_path):
    plans = {}
    for kind in ("other", "adapter"):
        config = load_config(None, keys(taught, tmp_path / kind, teacher_model_name_or_path=str(taught / kind)))
        plans[kind] = prepare_run(config).plan
    weights = load_file(taught / "model/model.safetensors")
    base = sum(4 * tensor.numel() for tensor in weights.values())
    factors = sum(4 * tensor.numel() for tensor in load_file(taught / "adapter/adapter_model.safetensors").values())
    assert plans["adapter"].weights == pytest.approx(base + factors, rel=0.01)
    assert plans["other"].weights == pytest.approx(2 * base, rel=0.01)
    assert plans["other"].answering is not None


def smaller_vocabulary(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] - 1}))
    weights = load_file(folder / "model.safetensors")
    heads = ("lm_head.weight", "model.embed_tokens.weight")
    save_file(weights | {name: weights[name][:-1].clone() for name in heads}, folder / "model.safetensors", PT)


def other_words(folder):
    said = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(said))


@pytest.mark.parametrize(("change", "why"), [(smaller_vocabulary, None), (other_words, "'[ab]'")])
def test_a_teacher_with_another_vocabulary_is_refused(taught, tmp_path, change, why):
    shutil.copytree(taught / "other", tmp_path / "teacher")
    change(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=why):
        run(taught, tmp_path / "out", teacher_model_name_or_path=str(tmp_path / "teacher"))
    assert not (tmp_path / "out").exists()


def test_check_and_preview_print_the_teacher(taught, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(keys(taught, tmp_path / "out", teacher_model_name_or_path=str(taught / "adapter"))))
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 0, found.output
    assert "shares" in found.output
    found = CliRunner().invoke(app, ["preview", str(file), "-n", "2", "--rollouts", "2"])
    assert found.exit_code == 0, found.output
    assert found.stdout.count("── answer") == 4
