"""`rope_scaling`: a run, its adapter, its merge and its GGUF file all have the scale that it was trained with."""

import json
import shutil

import gguf
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.config import load_config
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.runs.saved import load_saved, look_up
from halfbyte.serve.model import load as load_served
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import CheckpointError, ConfigError, UsageError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.sft_runs import keys

TRAINED, LENGTH = 16, 64  # tokens
IDS = torch.arange(5, 5 + LENGTH)[None]
LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0]}
TYPES = {
    "yarn": "yarn",
    "linear": {"type": "linear"},
    "dynamic": "dynamic",
    "llama3": "llama3",
    "longrope": {"rope_type": "longrope"} | LONG,
    "default": {"rope_type": "default", "rope_theta": 50000.0},
}


@pytest.fixture(scope="module")
def short(place, tmp_path_factory):
    """The fixture `place` with a model of a short context."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copytree(place, folder, dirs_exist_ok=True)
    write_config(folder / "model", max_position_embeddings=TRAINED)
    weights = load_file(folder / "model" / "model.safetensors")
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] *= 12  # attention that depends on the positions
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder, **changed):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))


def run(short, output, rope, **changed):
    options = {"max_steps": 2, "eval_split_size": 0.0, "sample_prompts": 0, "load_in_4bit": False}
    given = keys(short, output, rope_scaling=rope, max_length=LENGTH, **options | changed)
    return train(load_config(None, given))


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def unscaled(short, output):
    base = AutoModelForCausalLM.from_pretrained(short / "model", dtype=torch.float32)
    return logits(PeftModel.from_pretrained(base, output / "adapter"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", TYPES)
def test_every_file_of_a_run_has_its_scale(short, tmp_path, name):
    out = tmp_path / "out"
    run(short, out, TYPES[name])
    trained = logits(load_saved(str(out), ["dtype=float32"]).model)
    assert (trained - unscaled(short, out)).abs().max() > 0.01 * trained.abs().max()
    overrides = json.loads((out / "adapter" / "config_overrides.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(short / "model", dtype=torch.float32, **overrides)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, out / "adapter")), trained)
    merge(out, tmp_path / "merged", base="original")
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.max_position_embeddings == LENGTH
    assert config.rope_parameters == overrides["rope_parameters"]
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert (merged - trained).abs().max() < 0.05 * trained.abs().max()  # bfloat16 weights
    moved = shutil.copytree(out / "adapter", tmp_path / "moved")  # an adapter without its run
    torch.testing.assert_close(logits(load_saved(str(moved), ["dtype=float32"]).model), trained)


def test_merge_keeps_the_layout_of_the_config(short, tmp_path):
    """A config.json from before transformers 5 has `rope_scaling` and `rope_theta`, which other tools read."""
    old = shutil.copytree(short / "model", tmp_path / "base" / "model")
    config = json.loads((old / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (old / "config.json").write_text(json.dumps(config))
    run(short, tmp_path / "out", "yarn", model_name_or_path=str(old), max_steps=1)
    merge(tmp_path / "out", tmp_path / "merged", base="original", verify=False)
    merged = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert merged["rope_theta"] == config["rope_theta"]
    assert merged["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    assert "rope_parameters" not in merged


@pytest.fixture(scope="module")
def trained(short, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "yarn"
    run(short, out, "yarn")
    return out


def test_full_fine_tuning_saves_its_scale(short, tmp_path):
    out = tmp_path / "out"
    run(short, out, "yarn", use_peft=False, max_steps=1)
    config = AutoConfig.from_pretrained(out / "model")
    assert (config.rope_parameters["factor"], config.max_position_embeddings) == (4.0, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    torch.testing.assert_close(logits(load_saved(str(out), ["dtype=float32"]).model), logits(model))


def test_length_of_an_evaluation_changes_no_scale(trained):
    _, config = look_up(str(trained), ["max_length=24"])
    assert config.rope_scaling["factor"] == 4.0


def test_resumed_run_is_the_same(short, tmp_path):
    run(short, tmp_path / "whole", "yarn", max_steps=4)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    run(short, tmp_path / "again", "yarn", max_steps=4, resume_from_checkpoint=True)
    weights = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]
    with pytest.raises(ConfigError, match="rope_scaling"):
        run(short, tmp_path / "again", "linear", max_steps=6, resume_from_checkpoint=True)


def test_adapter_is_refused_at_another_scale(short, trained, tmp_path):
    config = load_config(None, keys(short, tmp_path / "next", adapter_path=str(trained / "adapter"), max_length=LENGTH))
    with pytest.raises(CheckpointError, match="rope_scaling"):
        prepare_run(config)
    with pytest.raises(CheckpointError, match="rope_scaling"):
        load_served(str(short / "model"), {"long": str(trained)})
    run(short, tmp_path / "plain", None, max_steps=1)
    with pytest.raises(UsageError, match="rope_scaling"):
        load_served(str(trained), {"short": str(tmp_path / "plain")})


def test_exports_of_an_adapter_describe_the_scale(trained, tmp_path):
    export_served(trained, tmp_path / "served")
    overrides = "config_overrides.json"
    assert (tmp_path / "served" / overrides).read_bytes() == (trained / "adapter" / overrides).read_bytes()
    assert "--hf-overrides" in notices_so_far()["served-rope"]
    export_adapter(trained, out=tmp_path / "a.gguf")
    assert "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 16 -c 64" in notices_so_far()["adapter-rope"]
    assert overrides in (trained / "README.md").read_text()


def test_gguf_file_has_the_scale(trained, tmp_path):
    export_gguf(str(trained), "f32", tmp_path / "m.gguf", device="cpu")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["llama.rope.scaling.type"].contents() == "yarn"
    assert fields["llama.rope.scaling.factor"].contents() == 4.0
    assert fields["llama.rope.scaling.original_context_length"].contents() == TRAINED
    assert fields["llama.context_length"].contents() == LENGTH


def test_rows_beyond_the_trained_context_are_logged(short, tmp_path):
    prepare_run(load_config(None, keys(short, tmp_path / "out", max_length=LENGTH)))
    assert "rope_scaling" in notices_so_far()["positions of the model"]
