"""Quantized merges: other tools load them, verification catches damage; refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.cli.commands import merge_run
from halfbyte.export.layouts import LAYOUTS
from halfbyte.export.merge import merge
from halfbyte.export.verify import Verifier, stored_values
from halfbyte.formats import named
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ConfigError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.merge_runs import by_peft, save_base, save_run, tensors

LAYER = "model.layers.1.mlp.down_proj"
OURS = ["nf4", "kbit3", "int8", "fp8", "hqq4", "mxfp4", "nvfp4-46"]
SLOW = [pytest.param(target, marks=pytest.mark.slow) for target in OURS[2:]]  # loaded as the first two are
KINDS = {
    "rslora and patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3.0}},
    "dora": {"use_dora": True},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "up_proj"]},
    "whole head and embedding": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run") / "run", base)


def loaded(folder, target):
    """The model by the tool that the target is for."""
    if target in ("bnb-nf4", "bnb-fp4", "bnb-int8", "fp8-block"):
        return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    return load_model(str(folder), dtype="bfloat16", device="cpu")


def spec(target):
    return LAYOUTS[target].spec.format(group=32, scales="bfloat16") if target in LAYOUTS else target


@pytest.mark.sampled(9)
@pytest.mark.parametrize("target", [*LAYOUTS, *OURS[:2], *SLOW])
def test_the_tool_reads_the_merged_weights_quantized_once(tmp_path, base, run, target):
    report = merge(run, tmp_path / "merged", base="original", quantize=target)
    assert (report.quantize, report.target) == (target, "original")
    found = report.targets["original"]
    assert found.explained
    assert found.exact.kl == pytest.approx(found.noise.kl, rel=0.5)
    model = loaded(tmp_path / "merged", target)
    expected = by_peft(run, base, "original")
    format_ = named(spec(target))
    for name in (LAYER, "model.layers.0.self_attn.k_proj"):
        values = stored_values(model.get_submodule(name))
        if "nvfp4" not in target:  # its factor is shared by q, k and v, tested below
            quantized = QuantizedTensor.quantize(expected[f"{name}.weight"], format_).dequantize()
            torch.testing.assert_close(values, quantized, rtol=2**-8, atol=0)
        assert (values - expected[f"{name}.weight"]).norm() < 0.3 * expected[f"{name}.weight"].norm()
    torch.testing.assert_close(
        model.get_parameter("model.norm.weight").float(), expected["model.norm.weight"].bfloat16().float()
    )
    logits = model(input_ids=torch.arange(40)[None]).logits
    assert logits.isfinite().all()
    saved = json.loads((run / f"merge-{target}.json").read_text())
    assert saved["targets"]["original"]["kl"] == found.trained.kl
    assert saved["bytes"] == report.nbytes == sum(each.nbytes for each in tensors(tmp_path / "merged").values())
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert (tmp_path / "merged" / "generation_config.json").exists()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("quantize", ["nf4", "int8"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_in_the_quantized_weights(tmp_path, kind, tied, quantize):
    base = save_base(tmp_path / "base", tie_word_embeddings=tied)
    run = save_run(tmp_path / "run", base, **KINDS[kind])
    merge(run, tmp_path / "merged", base="original", quantize=quantize, verify=False)
    model = load_model(str(tmp_path / "merged"), dtype="bfloat16", device="cpu")
    expected = by_peft(run, base, "original")
    changes_ends = "head" in kind
    assert model.config.tie_word_embeddings == (tied and not changes_ends)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter.data, QuantizedTensor):
            quantized = QuantizedTensor.quantize(expected[name], parameter.data.format).dequantize()
            torch.testing.assert_close(parameter.data.dequantize(torch.float32), quantized, rtol=0, atol=0, msg=name)
        elif not (tied and changes_ends):  # PEFT keeps tied weights tied, whichever of them it merges last
            assert torch.equal(parameter, expected[name].bfloat16()), name
    assert isinstance(model.get_submodule(LAYER).weight.data, QuantizedTensor)
    if tied and changes_ends:
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.slow
def test_patterns_decide_layer_by_layer(tmp_path, run):
    merge(run, tmp_path / "merged", quantize={"*.1.mlp.down_proj": "kbit5", "*.q_proj": "16bit", "*": "hqq4"})
    assert "prequantized" not in notices_so_far()  # reloading the written model gives no notice, e.g. about its folder
    model = load_model(str(tmp_path / "merged"), dtype="bfloat16", device="cpu")
    assert model.get_submodule(LAYER).weight.data.format.spec == named("kbit5").spec
    assert model.get_submodule("model.layers.0.mlp.down_proj").weight.data.format.spec == named("hqq4").spec
    assert not isinstance(model.get_submodule("model.layers.0.self_attn.q_proj").weight.data, QuantizedTensor)


@pytest.mark.slow
def test_a_server_may_fuse_what_shares_a_factor(tmp_path, base, run):
    """ModelOpt's rules: q, k, v and gate, up have one weight_scale_2 and one input_scale, near amax over 6·448."""
    merge(run, tmp_path / "merged", base="original", quantize="nvfp4-modelopt")
    found, expected = tensors(tmp_path / "merged"), by_peft(run, base, "original")
    for parent, group in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        names = [f"model.layers.0.{parent}.{each}_proj" for each in group]
        amax = max(float(expected[f"{name}.weight"].abs().max()) for name in names)
        for name in names:
            assert float(found[f"{name}.weight_scale_2"]) == pytest.approx(amax / (6 * 448), rel=1e-6)
            assert found[f"{name}.input_scale"] == found[f"{names[0]}.input_scale"]
            assert 1e-4 < found[f"{name}.input_scale"] * 6 * 448 < 1e3
    config = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"], config["ignore"]) == ("modelopt", "NVFP4", ["lm_head"])
    merge(run, tmp_path / "other", base="original", quantize="nvfp4-modelopt", verify=False)
    for name, tensor in tensors(tmp_path / "other").items():  # its activations' scales are measured all the same
        assert torch.equal(tensor, found[name]), name


# --- verification ----------------------------------------------------------------------------------------------------


DAMAGED = [pytest.param(target, marks=pytest.mark.slow) for target in ("kbit2", "hqq3", "fp8-tensor", "nvfp4")]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("target", [*LAYOUTS, "16bit", "nf4", *DAMAGED])
def test_one_damaged_tensor_is_caught_in_every_target(tmp_path, run, monkeypatch, target):
    honest = Verifier.verify

    def damaged(self, folder, base):
        names = {f"{LAYER}.{name}" for name in ("weight", "weight_packed", "qweight")}
        file = next(file for file in folder.glob("*.safetensors") if names & load_file(file).keys())
        entries = load_file(file)
        codes = entries[(names & entries.keys()).pop()].contiguous()
        codes.view(-1).view(torch.uint8)[: codes.nbytes // 2] ^= 1 if target != "16bit" else 128  # the lowest bit
        save_file(entries, file, metadata={"format": "pt"})
        return honest(self, folder, base)

    monkeypatch.setattr(Verifier, "verify", damaged)
    with pytest.raises(CheckpointError, match=None if target == "16bit" else f"{LAYER}.weight"):
        merge(run, tmp_path / "merged", base="original", quantize=target)
    assert not list(tmp_path.iterdir())


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantize", "words"),
    [("nf5", "'nf5'"), ("gptq:128:float16:runs", None), ({"*.w1": "nf4"}, None), ({"*": "16bit"}, None)],
)
def test_unknown_targets_are_refused(tmp_path, run, quantize, words):
    with pytest.raises(ConfigError, match=words):
        merge(run, tmp_path / "merged", quantize=quantize)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "sizes", "words"),
    [
        ("fp8-block", {"intermediate_size": 160}, r"gate_proj\.weight \(160, 64\):.*128"),
        ("nvfp4-modelopt", {"intermediate_size": 104}, r"gate_proj\.weight \(104, 64\):.*16"),
    ],
)
def test_shapes_that_a_target_cannot_hold_are_named(tmp_path, target, sizes, words):
    run = save_run(tmp_path / "run", save_base(tmp_path / "base", **sizes))
    with pytest.raises(ConfigError, match=words):
        merge(run, tmp_path / "merged", quantize=target)
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_the_command_takes_patterns_and_the_report_lists_the_targets(tmp_path, run, capsys):
    merge_run(run, tmp_path / "mixed", "dequantized", True, "*.down_proj=kbit5,*=nf4")
    merge_run(run, None, "dequantized", True, "int8")
    assert "int8" in capsys.readouterr().out
    assert (run / "merged-int8" / "config.json").exists()
    page = Path(run / "report.html").read_text()
    assert "Merge target" in page
    assert '<th scope="row">int8</th>' in page
    assert '<th scope="row">*.down_proj=kbit5,*=nf4</th>' in page
    with pytest.raises(ConfigError):
        merge_run(run, tmp_path / "other", "auto", True, "*.down_proj=,*=nf4")
