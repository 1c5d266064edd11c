"""Merging: numbers equal PEFT's merge, side files are copied, and verification catches damage."""

import json
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from halfbyte.cli.commands import merge_run
from halfbyte.export import verify
from halfbyte.export.fidelity import Distance
from halfbyte.export.merge import merge
from halfbyte.export.weights import MergedWeights
from halfbyte.loading.load import load_model
from halfbyte.utils.errors import CheckpointError, ConfigError, TrainingError
from halfbyte.utils.files import write_json
from halfbyte.utils.notices import notices_so_far
from tests.helpers.merge_runs import TEMPLATE, by_peft, save_base, save_run, tensors

KINDS = {
    "lora": {"lora_alpha": 12.0},
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3.0}},
    "dora": {"use_dora": True},
    "two layers' modules": {"target_modules": r".*layers\.1\.(self_attn\.v_proj|mlp\.down_proj)"},
    "whole head and embedding": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "whole norm": {"modules_to_save": ["input_layernorm"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
    "bf16 adapter": {"adapter_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run") / "run", base)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("target", ["original", "dequantized"])
@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_pefts_rounded_once(tmp_path, base, kind, target):
    run = save_run(tmp_path / "run", base, **KINDS[kind])
    report = merge(run, tmp_path / "merged", base=target, verify=False)
    assert report.target == target
    assert not report.targets
    expected, found = by_peft(run, base, target), tensors(tmp_path / "merged")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor.bfloat16(), rtol=0, atol=0, msg=name)
    changed = [name for name, tensor in tensors(base).items() if not torch.equal(tensor, found[name])]
    assert changed


@pytest.mark.slow
def test_an_update_below_the_resolution_of_bf16_is_explained_and_said(tmp_path, base):
    """After a few steps ΔW is below half an ulp of a bf16 base, which rounds most of it away."""
    run = save_run(tmp_path / "run", base, scale=2e-4, load_in_4bit=False)
    with pytest.raises(ConfigError, match="99% is required"):
        merge(run, tmp_path / "merged", min_update_kept=0.99)
    assert not (tmp_path / "merged").exists()
    report = merge(run, tmp_path / "merged")
    written = report.targets["original"]
    assert 0.3 < written.lost < 1
    assert written.explained


@pytest.mark.sampled(9)
@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "keys", [{}, {"load_in_4bit": False}, {"bnb_4bit_quant_type": "fp4", "bnb_4bit_blocksize": 32}]
)
def test_verification_is_explained_by_rounding_and_says_which_is_closer(tmp_path, base_dtype, keys):
    base = save_base(tmp_path / "base", base_dtype)
    run = save_run(tmp_path / "run", base, **keys)
    report = merge(run, tmp_path / "merged")
    closer = "dequantized" if keys.get("load_in_4bit", True) else "original"
    assert report.closer == report.target == closer
    assert report.dtype == ("float16" if base_dtype == torch.float16 else "bfloat16")
    for fidelity in report.targets.values():
        assert 0 < fidelity.exact.max_logit_difference <= fidelity.bound
        assert fidelity.exact.kl <= fidelity.kl_bound
        assert fidelity.bound < 0.1 * fidelity.largest_logit
    saved = json.loads((run / "merge.json").read_text())
    assert saved["closer"] == saved["written"] == closer
    assert saved["targets"].keys() == ({"original", "dequantized"} if closer == "dequantized" else {"original"})
    assert saved["targets"][closer]["kl"] == report.targets[closer].trained.kl
    assert saved["tokens"] >= 256
    if closer == "dequantized":
        assert saved["targets"]["original"]["kl"] > 20 * saved["targets"]["dequantized"]["kl"]


@pytest.mark.slow
def test_auto_goes_back_to_the_first_target_when_that_one_is_closer(tmp_path, base, run, monkeypatch):
    honest = verify.Verifier.verify

    def swapped(self, folder, target):
        return replace(honest(self, folder, target), trained=Distance(float(target == "dequantized"), 1.0))

    monkeypatch.setattr(verify.Verifier, "verify", swapped)
    report = merge(run, tmp_path / "merged")
    assert report.target == report.closer == "original"
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors(tmp_path / "merged")[name], by_peft(run, base, "original")[name].bfloat16())


def test_the_folder_is_a_plain_checkpoint(tmp_path, base, run):
    out = tmp_path / "merged"
    merge(run, out)
    shards = {file.name for file in base.glob("*.safetensors")}
    assert len(shards) == 2
    assert {file.name for file in out.glob("*.safetensors")} == shards
    index, of_base = (json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (out, base))
    assert index["weight_map"] == of_base["weight_map"]
    assert index["metadata"]["total_size"] == of_base["metadata"]["total_size"]
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 17
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer("a b</s>")["input_ids"] == AutoTokenizer.from_pretrained(base)("a b</s>")["input_ids"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_a_plain_reload_computes_what_base_and_adapter_compute(tmp_path, base, run):
    merge(run, tmp_path / "merged")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        adapted = PeftModel.from_pretrained(load_model(str(base), dtype="float32", device="cpu"), run / "adapter")
        expected = adapted(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * float(expected.abs().max()))


# --- tied weights ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "keys",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["lm_head", "q_proj"]},
    ],
)
def test_tied_weights_are_untied_if_the_adapter_changes_one(tmp_path, keys):
    base = save_base(tmp_path / "base", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensors(base)
    run = save_run(tmp_path / "run", base, **keys)
    report = merge(run, tmp_path / "merged")
    assert report.targets["dequantized"].explained
    found = tensors(tmp_path / "merged")
    stored = tensors(base)["model.embed_tokens.weight"]
    changed = json.dumps(keys)
    assert torch.equal(found["model.embed_tokens.weight"], stored) == ("embed_tokens" not in changed)
    assert torch.equal(found["lm_head.weight"], stored) == ("lm_head" not in changed)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False


# --- other bases -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_base_stored_in_4_bits_is_dequantized(tmp_path, base):
    load_model(str(base), device="cpu", dtype="bfloat16").save_pretrained(tmp_path / "packed")
    run = save_run(tmp_path / "run", tmp_path / "packed")
    report = merge(run, tmp_path / "merged")
    assert list(report.targets) == ["dequantized"]
    expected, found = by_peft(run, base, "dequantized"), tensors(tmp_path / "merged")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in found.items())
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_transposed_weights_and_a_checkpoint_without_the_models_prefix(tmp_path):
    """GPT-2: Conv1D layers, and the first checkpoints name tensors without `transformer.`."""
    torch.manual_seed(1)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=272, initializer_range=0.2)
    model = GPT2LMHeadModel(config).bfloat16()
    model.transformer.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    run = save_run(tmp_path / "run", tmp_path / "base", load_in_4bit=False, target_modules=["c_attn", "c_proj"])
    assert merge(run, tmp_path / "merged").targets["original"].explained
    expected, found = by_peft(run, tmp_path / "base", "original"), tensors(tmp_path / "merged")
    assert found.keys() == tensors(tmp_path / "base").keys()
    assert all(torch.equal(tensor, expected[f"transformer.{name}"].bfloat16()) for name, tensor in found.items())


@pytest.mark.slow
def test_an_adapter_alone_is_merged_onto_the_base_it_names(tmp_path, base, run):
    report = merge(run / "adapter", tmp_path / "of run")  # its run lies around it
    assert report.target == "dequantized"
    alone = tmp_path / "alone"
    (run / "adapter").rename(alone)
    try:
        report = merge(alone, tmp_path / "merged")
        assert report.target == "original"  # nothing says that it was trained on 4 bits
        assert not (alone / "merge.json").exists()
    finally:
        alone.rename(run / "adapter")


# --- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.k_proj.weight"],
)
def test_a_wrong_tensor_is_caught_by_the_logits(tmp_path, run, monkeypatch, name):
    honest = MergedWeights.tensor

    def flipped(self, output, target):
        tensor = honest(self, output, target)
        return -tensor if output.parameter == name else tensor

    monkeypatch.setattr(MergedWeights, "tensor", flipped)
    with pytest.raises(CheckpointError):
        merge(run, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_one_changed_bit_on_disk_is_caught_and_named(tmp_path, run, monkeypatch):
    from halfbyte.export import weights

    honest = weights.write_shard

    def damaged(path, entries, make):
        sums = honest(path, entries, make)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        return sums

    monkeypatch.setattr(weights, "write_shard", damaged)
    with pytest.raises(CheckpointError):
        merge(run, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_merge_is_complete_without_its_report(tmp_path, run, monkeypatch, capsys):
    """If the disk is full after the model is written, the model remains."""

    def full(path, *content):
        if path.name == "config.json":
            return write_json(path, *content)
        raise TrainingError(f"cannot write {path}: no space left on device", "free some space")

    monkeypatch.setattr("halfbyte.export.merge.write_json", full)
    monkeypatch.setattr("halfbyte.report.page.write_report", full)
    merge_run(run, tmp_path / "merged", "auto", True)
    assert f"{tmp_path / 'merged'}" in capsys.readouterr().out
    assert "merge-report" in notices_so_far()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
