"""A whole run, from a folder with a tiny checkpoint and a JSONL file to a run directory."""

import contextlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from halfbyte.config import load_config
from halfbyte.mesh.mesh import Mesh
from halfbyte.methods.sft import SupervisedFineTuning
from halfbyte.modeling import head
from halfbyte.runs.checkpoints import starting_point
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train import run as sft
from halfbyte.train import setup
from halfbyte.train.run import finetune, train
from halfbyte.utils.errors import ConfigError, DataError, ModelError, TrainingError
from tests.helpers.sft_runs import keys, run

FILES = {
    "README.md", "checks.json", "config.resolved.yaml", "data_report.json", "environment.json",
    "generations.json", "memory.json", "metrics.jsonl", "report.html", "run.yaml", "status.json",
}  # fmt: skip


def read(output, name):
    return json.loads((Path(output) / name).read_text())


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory, drawing):
    output = tmp_path_factory.mktemp("finished") / "out"
    with drawing():
        return run(place, output)


def test_a_run_leaves_everything_and_learns(finished):
    assert {path.name for path in finished.output_dir.iterdir()} == FILES | {"adapter", "checkpoint-4", "checkpoint-6"}
    records = MetricsFile(finished.output_dir / "metrics.jsonl").records()
    assert [r["step"] for r in records if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if r["kind"] == "eval"] == [0, 5, 6]
    assert finished.metrics["eval_loss"] < finished.metrics["eval_loss_before"]
    assert finished.metrics["steps"] == 6
    assert finished.metrics["peak_bytes"] > 0


def test_its_files_say_what_the_seams_promise(finished, place):
    memory = read(finished.output_dir, "memory.json")
    assert memory["measured"].keys() == {"base_bytes", "after_load_bytes", "peak_bytes", "run_bytes"}
    assert memory["predicted"]["total"] > 0
    answers = read(finished.output_dir, "generations.json")
    assert len(answers) == 2
    assert all("what is" in entry["prompt"] and "it is" in entry["reference"] for entry in answers)
    assert all(isinstance(entry[name], str) for entry in answers for name in ("before", "after"))
    environment = read(finished.output_dir, "environment.json")
    assert environment["started"] < environment["finished"]
    checked = read(finished.output_dir, "checks.json")
    assert checked["adapter_reload"]["equal"]
    assert checked["first_step"]["difference"] < 1e-4


def test_the_head_skips_prompts(place, tmp_path, monkeypatch):
    """Also in evaluations; the losses are equal up to rounding to a run whose head computes all positions."""
    shapes, loss_of = [], head.linear_cross_entropy
    monkeypatch.setattr(head, "linear_cross_entropy", lambda x, *a, **k: shapes.append(x.shape) or loss_of(x, *a, **k))
    short = {"max_steps": 2, "warmup_steps": 0, "sample_prompts": 0}
    skipping = run(place, tmp_path / "skipping", **short)
    assert sum(len(shape) == 2 for shape in shapes) >= 4  # training steps and evaluations; others are checks
    monkeypatch.setattr(SupervisedFineTuning, "skips_rows", False)
    complete = run(place, tmp_path / "complete", **short)
    for name in ("eval_loss", "eval_loss_before"):
        assert skipping.metrics[name] == pytest.approx(complete.metrics[name], rel=1e-5)


def test_it_leaves_the_keys_that_were_given_as_a_file(finished, place, tmp_path):
    file = finished.output_dir / "run.yaml"
    assert load_config(file) == load_config(None, keys(place, finished.output_dir))
    assert "lr_scheduler_type" not in file.read_text()
    kept = tmp_path / "out" / "run.yaml"
    kept.parent.mkdir()
    kept.write_text("# mine\n")
    run(place, kept.parent, max_steps=1, warmup_steps=0, sample_prompts=0)
    assert kept.read_text() == "# mine\n"


def test_a_finished_run_that_is_resumed_stays_as_it_is(finished, place):
    folder = finished.output_dir
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    again = train(load_config(None, keys(place, folder)), resume=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    assert again.metrics == finished.metrics


@pytest.mark.parametrize(
    "missing", [{"report.html"}, {"README.md", "report.html"}, {"README.md", "report.html", "checks.json", "adapter"}]
)
def test_what_a_run_killed_at_its_end_did_not_write_is_written(finished, place, tmp_path, monkeypatch, missing):
    """Without training again; the files made from what was computed, without loading the model."""
    output = Path(shutil.copytree(finished.output_dir, tmp_path / "out"))
    for name in missing:
        shutil.rmtree(output / name) if name == "adapter" else (output / name).unlink()
    (output / ".lock").write_text(json.dumps({"host": "h", "machine": "0" * 8, "pid": 1, "since": 1}))
    (output / ".checkpoint-4.cut").mkdir()
    for name in ["_run"] + ["load_model"] * ("adapter" not in missing):
        monkeypatch.setattr(setup if name == "load_model" else sft.TrainingLoop, name, None)
    again = train(load_config(None, keys(place, output)), resume=True)
    assert again.metrics["loss"] == finished.metrics["loss"]
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in finished.output_dir.iterdir())
    weights = (folder / "adapter" / "adapter_model.safetensors" for folder in (output, finished.output_dir))
    assert len({file.read_bytes() for file in weights}) == 1
    if "adapter" not in missing:
        cards = [(folder / "README.md").read_text() for folder in (output, finished.output_dir)]
        assert cards[0].replace(str(output), str(finished.output_dir)) == cards[1]


@pytest.mark.slow
def test_another_runs_last_checkpoint_does_not_finish_a_run(finished, place, tmp_path):
    other = run(place, tmp_path / "out", max_steps=2, seed=7)
    before = (other.output_dir / "adapter" / "adapter_model.safetensors").read_bytes()
    train(load_config(None, keys(place, other.output_dir)), resume=str(finished.output_dir / "checkpoint-6"))
    after = (other.output_dir / "adapter" / "adapter_model.safetensors").read_bytes()
    assert before != after == (finished.output_dir / "adapter" / "adapter_model.safetensors").read_bytes()


def test_the_adapter_loads_in_plain_peft_on_the_original_base(finished, place):
    saved = read(finished.output_dir / "adapter", "adapter_config.json")
    assert saved["base_model_name_or_path"] == str(place / "model")
    base = AutoModelForCausalLM.from_pretrained(saved["base_model_name_or_path"], dtype=torch.float32)
    ids = torch.arange(10)[None]
    plain = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, finished.output_dir / "adapter")(input_ids=ids).logits
    assert not torch.allclose(plain, adapted, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"load_in_4bit": False},
        {"packing": True, "activation_checkpointing": True},
        {"padding_free": True, "dtype": "bfloat16"},
        {"dtype": "bfloat16", "adapter_dtype": "bfloat16", "use_dora": True},
        {"modules_to_save": ["lm_head"], "neftune_noise_alpha": 5.0, "eval_split_size": 0},
        {"sample_prompts": ["what is 2 plus 2?"], "max_grad_norm": 0.0, "logging_steps": 4},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_other_ways_to_train(place, tmp_path, changed):
    result = run(place, tmp_path, max_steps=2, **changed)
    assert result.metrics["steps"] == 2
    checked = read(tmp_path, "checks.json")["adapter_reload"]
    assert checked["largest_difference"] <= checked["largest_logit"] / 64


def test_full_fine_tuning_keeps_float32_weights_and_saves_as_the_base_was_stored(place, tmp_path):
    run(place, tmp_path, use_peft=False, load_in_4bit=False, dtype="auto", learning_rate=1e-3, max_steps=2)
    assert not (tmp_path / "adapter").exists()
    assert read(tmp_path, "checks.json")["model_reload"]["equal"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(place / "model")
    assert saved.dtype == base.dtype == torch.bfloat16
    assert any(not torch.equal(p, q) for p, q in zip(saved.parameters(), base.parameters(), strict=True))
    assert saved.config.eos_token_id == base.config.eos_token_id


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"model_name_or_path": "/nowhere/model"}, ModelError),
        ({"dataset": "/nowhere/data.jsonl"}, DataError),
        ({"target_modules": ["q_prj"]}, ModelError),
        ({"attn_implementation": "flex_attention"}, ConfigError),
    ],
)
def test_bad_input_leaves_no_run_behind(place, tmp_path, changed, error):
    with pytest.raises(error):
        run(place, tmp_path / "out", **changed)
    assert starting_point(load_config(None, keys(place, tmp_path / "out")), None) is None


def test_running_out_of_memory_gives_advice(place, tmp_path, monkeypatch):
    def exhausted(*positional, **keys):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(sft.TrainingLoop, "steps", exhausted)
    with pytest.raises(TrainingError, match=r"(?s)2.00 GiB"):
        run(place, tmp_path)


def test_a_run_that_stops_leaves_the_report_of_what_it_did(place, tmp_path, monkeypatch):
    sums = sft.TrainingLoop.sums

    def broken(loop, batch):
        factor = math.nan if loop.state.global_step == 2 else 1.0
        return {name: value * factor for name, value in sums(loop, batch).items()}

    monkeypatch.setattr(sft.TrainingLoop, "sums", broken)
    with pytest.raises(TrainingError):
        run(place, tmp_path)
    report = (tmp_path / "report.html").read_text()
    assert "step 3:" in report
    assert "Final training loss" in report


def test_processes_that_read_different_data_are_refused(place, tmp_path, monkeypatch):
    class Differing(Mesh):
        def all_equal(self, value):
            return value is None

    monkeypatch.setattr(sft, "present_mesh", lambda *where: contextlib.nullcontext(Differing()))
    with pytest.raises(DataError):
        run(place, tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_only_the_main_process_writes(place, tmp_path, monkeypatch):
    class Other(Mesh):
        is_main = False

    monkeypatch.setattr(sft, "present_mesh", lambda *where: contextlib.nullcontext(Other()))
    assert run(place, tmp_path, max_steps=2).metrics == {}
    assert {path.name for path in tmp_path.rglob("*")} <= {".lock"}


def test_finetune_takes_keys_and_names_unknown_ones(place, tmp_path):
    with pytest.raises(ConfigError, match="learning_rate"):
        finetune("m", "d", learning_rte=1)


def test_whole_models_are_compared_under_the_names_they_are_saved_by(tmp_path):
    """GPT-NeoX's head is lm_head in memory, and embed_out in files where transformers keeps the older name."""
    import transformers

    from halfbyte.train.checks import model_reload

    config = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path)
    assert model_reload(model, tmp_path)["equal"]
    with torch.no_grad():
        model.get_output_embeddings().weight[3, 5] += 1
    with pytest.raises(TrainingError, match=r"(embed_out|lm_head)\.weight"):
        model_reload(model, tmp_path)
