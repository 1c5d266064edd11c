"""A mixture of experts from the command line: quantized, trained with adapters, resumed, merged, and generating."""

import json
import shutil

import pytest
import torch
import transformers

from halfbyte.cli import main
from halfbyte.loading.load import load_model
from tests.helpers.expert_models import MIXTURES, SHAPE
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows

KEYS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of four steps, with a checkpoint after two."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(2)
    config = transformers.Qwen3MoeConfig(**(SHAPE | MIXTURES["Qwen3Moe"] | KEYS))
    write_model(folder / "model", transformers.AutoModelForCausalLM.from_config(config))
    write_rows(folder / "rows.jsonl", [20, 33, 17, 40] * 8)
    run = {
        "model_name_or_path": folder / "model", "dataset": folder / "rows.jsonl", "output_dir": folder / "out",
        "max_length": 64, "packing": "true", "r": 4, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2,
        "warmup_steps": 0, "device": "cpu", "modules_to_save": "[gate]", "moe_aux_loss_coef": 0.01,
    }  # fmt: skip
    (folder / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in run.items()))
    assert ran("train", folder / "run.yaml") == 0
    return folder


def ran(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(each) for each in arguments])
    return stop.value.code or 0


@pytest.mark.slow
def test_experts_are_trained_and_their_adapter_loads(trained):
    out = trained / "out"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    reload = json.loads((out / "checks.json").read_text())["adapter_reload"]
    assert reload["equal"]
    assert reload["experts_changed"] == reload["experts"] == 16  # two stacks of four in each of two layers
    assert all(0.9 < line["aux_loss"] < 4 for line in lines if "loss" in line)
    use = json.loads((out / "experts.json").read_text())
    assert {sum(each["used"]) for each in use["layers"].values()} == {
        2 * sum(line["tokens"] for line in lines if line["kind"] == "train")
    }
    assert "entropy" in (out / "report.html").read_text()
    model = load_model(str(trained / "model"), device="cpu", dtype="auto")  # as the run: float32 without AVX-512
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert json.loads((out / "memory.json").read_text())["predicted"]["weights"] == held


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_offloaded_experts_train_to_the_same_weights(trained, tmp_path, monkeypatch, capsys, device):
    """The same weights, after a resume, too, and the same answers; a CPU stands for a device that is not the host."""
    monkeypatch.setattr("halfbyte.plan.experts._unsupported_reason", lambda *_: None)
    common = [f"device={device}", "deterministic=true", "activation_checkpointing=keep"]
    weights = {}
    for offload in ("false", "true"):
        asked = [*common, f"expert_offload={offload}", f"output_dir={tmp_path / offload}"]
        assert ran("train", trained / "run.yaml", *asked) == 0
        memory = json.loads((tmp_path / offload / "memory.json").read_text())
        assert memory["offloaded"] == ([0, 1] if offload == "true" else [])
        weights[offload] = (tmp_path / offload / "adapter/adapter_model.safetensors").read_bytes()
    assert weights["true"] == weights["false"]
    for folder in ("checkpoint-4", "adapter"):
        shutil.rmtree(tmp_path / "true" / folder)
    assert ran("train", trained / "run.yaml", *asked, "--resume") == 0
    assert (tmp_path / "true/adapter/adapter_model.safetensors").read_bytes() == weights["false"]
    (tmp_path / "prompts.txt").write_text("what is one\n")
    capsys.readouterr()
    for name in ("false", "true"):
        assert (
            ran("generate", tmp_path / name, tmp_path / "prompts.txt", "--max-new-tokens", 8, "--temperature", 0) == 0
        )
    answers = [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert all(answers)
    assert device != "cpu" or answers[0] == answers[1]  # another forward may break near ties differently
