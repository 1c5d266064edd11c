"""A kind of adapter that this test adds: VeRA, one row and PEFT's own layers. Nothing in the package names it."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from halfbyte import adapter_kinds
from halfbyte.adapter_kinds import AdapterKind, register_adapter
from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.runs.metrics import MetricsFile
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import finetune
from halfbyte.utils.errors import ConfigError
from tests.helpers.merge_runs import by_peft, save_base_and_sums, tensors

WEIGHTS = "adapter_model.safetensors"
VERA = AdapterKind(
    name="VeRA",
    peft_type="VERA",
    options=lambda adapter: {"r": adapter.r, "vera_dropout": adapter.lora_dropout, "save_projection": True},
    tensors=re.compile(r"(?P<module>.+)\.vera_lambda_[bd]|base_model\.vera_[AB]"),
    keys=("r", "lora_dropout"),
    reported=("r",),
)


@pytest.fixture(scope="module", autouse=True)
def registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_kinds, "ADAPTERS", [row for row in adapter_kinds.ADAPTERS if row.peft_type != "VERA"])
        register_adapter(VERA)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_and_sums(tmp_path_factory.mktemp("base"))


def train(base, output, **keys):
    keys = {"r": 8, "lora_dropout": 0.1, "learning_rate": 0.05, "max_steps": 4, "save_steps": 2, "device": "cpu"} | keys
    keys |= {"per_device_train_batch_size": 4, "max_length": 32, "sample_prompts": 1, "sample_max_new_tokens": 4}
    return finetune(str(base / "model"), str(base / "data.txt"), output_dir=str(output), peft_type="VERA", **keys)


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return train(base, tmp_path_factory.mktemp("run") / "out").output_dir


@pytest.mark.slow
def test_a_run_on_nf4_trains_its_vectors_only(run):
    weights = load_file(run / "adapter" / WEIGHTS)
    vectors = {name: tensor for name, tensor in weights.items() if "vera_lambda" in name}
    assert len(vectors) == 2 * 7 * 2
    assert any(tensor.any() for name, tensor in vectors.items() if name.endswith("_b"))
    assert {name for name in weights if name not in vectors} == {"base_model.vera_A", "base_model.vera_B"}
    assert load_config(run / "config.resolved.yaml").peft_type == "vera"


def test_a_stopped_run_is_resumed_to_equal_bytes(base, run, tmp_path, monkeypatch):
    append = MetricsFile.append

    def stop(metrics, record, *args, **keys):
        if record.get("step") == 3:
            raise KeyboardInterrupt
        return append(metrics, record, *args, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "append", stop)
        with pytest.raises(KeyboardInterrupt):
            train(base, tmp_path / "out")
    assert (tmp_path / "out" / "checkpoint-2").exists()
    train(base, tmp_path / "out", resume_from_checkpoint=True)
    assert (tmp_path / "out" / "adapter" / WEIGHTS).read_bytes() == (run / "adapter" / WEIGHTS).read_bytes()


def test_plain_peft_computes_what_a_loaded_run_computes(base, run):
    loaded = load_saved(str(run), ["device=cpu", "load_in_4bit=false", "dtype=float32"])
    plain = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    ids = torch.arange(1, 17)[None]
    with torch.no_grad():
        untrained = plain(ids).logits
        expected = PeftModel.from_pretrained(plain, run / "adapter").eval()(ids).logits
        torch.testing.assert_close(loaded.model(ids).logits, expected)
    assert not torch.allclose(expected, untrained, atol=1e-3)


def test_merging_measures_bases_and_writes_the_sum_onto_the_closer_one(base, run, tmp_path):
    merged = CliRunner().invoke(app, ["merge", str(run), str(tmp_path / "merged")])
    assert merged.exit_code == 0, merged.output
    measured = json.loads((run / "merge.json").read_text())
    assert measured["closer"] == measured["written"]
    expected = by_peft(run, base / "model", measured["written"])
    for name, tensor in tensors(tmp_path / "merged").items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("command", [["--gguf", "f16", "--adapter-only"], ["--adapter", "vllm"]], ids=["gguf", "vllm"])
def test_formats_of_low_rank_factors_refuse_it(run, command):
    refused = CliRunner().invoke(app, ["export", str(run), *command])
    assert refused.exit_code == 1
    assert "VeRA" in refused.output


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"lora_alpha": 32}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"qat_scheme": "int4", "load_in_4bit": False}, "peft_type"),
        ({"parallel": {"tensor": 2}}, "peft_type"),
        ({"peft_type": "ia4"}, "peft_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_its_row_does_not_allow_is_refused(keys, named):
    with pytest.raises(ConfigError, match=named):
        load_config(None, {"model_name_or_path": "m", "dataset": "d", "peft_type": "vera"} | keys)


def test_a_run_that_continues_another_kind_is_refused(base, run, tmp_path):
    with pytest.raises(ConfigError, match="peft_type"):
        finetune(
            str(base / "model"), str(base / "data.txt"), output_dir=str(tmp_path), adapter_path=str(run / "adapter")
        )
