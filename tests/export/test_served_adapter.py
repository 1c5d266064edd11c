"""Adapters as servers read them: an expert's factors under its name, and the same numbers in plain PEFT."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from halfbyte import load_model
from halfbyte.adapters.lora import load_adapter
from halfbyte.cli import main
from halfbyte.config import load_config
from halfbyte.export.adapter import AdapterLayers
from halfbyte.export.served_adapter import ServedAdapter, export_served
from halfbyte.utils.errors import CheckpointError, ConfigError
from tests.helpers.expert_models import TOKENS, mixture
from tests.helpers.merge_runs import byte_tokenizer, save_base, save_run

SIZES = {"vocab_size": 272, "eos_token_id": 257, "bos_token_id": 256}


def run_of(name, folder, **keys):
    mixture(name, **SIZES).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    return save_run(folder / "run", folder / "base", load_in_4bit=False, **keys)


def logits(folder, adapter):
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "keys"),
    [("Qwen3Moe", {}), ("Mixtral", {"use_rslora": True}), ("Olmoe", {"rank_pattern": {"experts.down_proj": 2}})],
)
def test_plain_peft_reads_the_same_numbers(name, keys, tmp_path):
    """It makes stacks of experts' factors again."""
    run = run_of(name, tmp_path, **keys)
    out = export_served(run)
    assert out == run / "adapter-vllm"
    torch.testing.assert_close(logits(tmp_path, out), logits(tmp_path, run / "adapter"), rtol=1e-5, atol=1e-5)


def test_names_are_the_checkpoints(tmp_path):
    run = run_of("Mixtral", tmp_path, r=4)
    tensors = load_file(export_served(run) / "adapter_model.safetensors")
    base = load_file(tmp_path / "base/model.safetensors")
    names = {key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in tensors}
    assert {f"{name}.weight" for name in names} <= base.keys()
    for expert in range(3):
        for leaf in ("w1", "w2", "w3"):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.{leaf}"
            a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            assert (b @ a).shape == base[f"{name}.weight"].shape
            assert (b @ a).abs().max() > 0


@pytest.mark.parametrize("name", [pytest.param("Qwen3Moe", marks=pytest.mark.slow), "dense"])
def test_an_adapter_that_trains_is_written_as_the_saved_one(name, tmp_path):
    """On packed weights, with a frozen copy of another adapter loaded."""
    keys = {"load_in_4bit": True, "rank_pattern": {"q_proj": 2}}
    if name == "dense":
        run = save_run(tmp_path / "run", save_base(tmp_path / "base"), **keys)
    else:
        mixture(name, **SIZES).save_pretrained(tmp_path / "base")
        byte_tokenizer().save_pretrained(tmp_path / "base")
        run = save_run(tmp_path / "run", tmp_path / "base", **keys)
    model = load_adapter(load_model(str(tmp_path / "base"), device="cpu"), run / "adapter", str(tmp_path / "base"))
    load_adapter(model, run / "adapter", str(tmp_path / "base"), "reference")
    origin = load_config(run / "config.resolved.yaml")
    served = ServedAdapter(AdapterLayers(origin, None, torch.device("cpu"), trained=model), origin.origin, "it")
    theirs = load_file(export_served(run) / "adapter_model.safetensors")
    ours = served.tensors()
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in theirs)
    with torch.no_grad():
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_B["default"].weight.add_(1)
    changed = [key for key, value in served.tensors().items() if not value.equal(ours[key])]
    assert changed == ["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]


@pytest.mark.slow
def test_command(tmp_path, capsys):
    run = save_run(tmp_path / "run", save_base(tmp_path / "base"))
    for arguments, code in (
        (["--adapter", "vllm", "--out", str(tmp_path / "out")], 0),
        (["--adapter", "vllm", "--gguf", "f16"], 2),
        (["--adapter", "tgi"], 2),
        ([], 2),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["export", str(run), *arguments])
        assert (stop.value.code or 0) == code, arguments
    assert "--enable-lora" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 4


def test_what_servers_cannot_apply_is_refused(tmp_path):
    with pytest.raises(CheckpointError):
        export_served(run_of("GptOss", tmp_path / "stacked"))
    with pytest.raises(CheckpointError):
        export_served(run_of("Qwen3Moe", tmp_path / "router", modules_to_save=["gate"]))
    run = save_run(tmp_path / "dora", save_base(tmp_path / "base"), use_dora=True)
    with pytest.raises(CheckpointError, match="DoRA"):
        export_served(run)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError):
        export_served(run, tmp_path / "there")
