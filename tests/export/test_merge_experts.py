"""Merging adapters on stacked experts: equal to PEFT, one expert at a time; refusals."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from halfbyte.export import verify
from halfbyte.export.merge import merge
from halfbyte.formats import named
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError
from halfbyte.utils.notices import reset_notices
from tests.helpers.expert_models import dequantized, mixture, stacks
from tests.helpers.merge_runs import byte_tokenizer, save_run

SIZES = {"vocab_size": 272, "eos_token_id": 257, "bos_token_id": 256}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function from a mixture's name to its model, the folder of that, and of a run with a random adapter."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            model = mixture(name, **SIZES).to(torch.bfloat16)
            model.save_pretrained(folder / "base", max_shard_size="60KB")
            byte_tokenizer().save_pretrained(folder / "base")
            made[name] = model, folder / "base", save_run(folder / "run", folder / "base")
        return made[name]

    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize("target", ["original", "dequantized"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral", "GptOss"])
def test_merged_experts_are_pefts_rounded_once(name, target, trained, tmp_path):
    model, base, run = trained(name)
    report = merge(run, tmp_path / "merged", base=target, verify=False)
    assert report.experts == ({"Qwen3Moe": 24, "Mixtral": 18, "GptOss": 16}[name],) * 2
    onto = model.float() if target == "original" else dequantized(model.float(), load_model(str(base), device="cpu"))
    expected = PeftModel.from_pretrained(onto, run / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for (key, mine), (other, theirs) in zip(merged.named_parameters(), expected.named_parameters(), strict=True):
        assert key == other
        torch.testing.assert_close(mine, theirs.bfloat16().float(), rtol=0, atol=0, msg=key)


@pytest.mark.slow
def test_each_expert_is_merged_and_that_is_verified(trained, tmp_path):
    model, _, run = trained("Qwen3Moe")
    report = merge(run, tmp_path / "merged")
    assert report.target == "dequantized"
    assert report.targets["dequantized"].explained
    assert report.experts == (24, 24)  # gate, up and down of four experts in two layers
    assert report.as_dict()["experts_changed"] == 24
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    for key, before in model.named_parameters():
        if ".experts." in key:
            changed = (merged.get_parameter(key) != before.bfloat16()).flatten(1).any(1)
            assert changed.all(), key


@pytest.mark.slow
def test_rerouting_by_rounding_passes(tmp_path):
    """Two different experts with nearly tied routers: the last bits decide which one a token takes."""
    model = mixture("Qwen3Moe", **SIZES, num_experts_per_tok=1).to(torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            router = layer.mlp.gate.weight
            router.mul_(8)
            router[1] = router[0]
            router[1, 0] *= 1 + 2**-7  # the next number in bf16
            layer.mlp.experts.down_proj.mul_(4)
            layer.mlp.experts.down_proj[1] = -layer.mlp.experts.down_proj[0]
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    report = merge(save_run(tmp_path / "run", tmp_path / "base"), tmp_path / "merged", base="original")
    found = report.targets["original"]
    assert found.moved[0] > 0
    assert found.explained
    assert found.trained.max_logit_difference > found.bound  # a token went elsewhere
    assert report.as_dict()["targets"]["original"]["choices_held"] == found.moved[0]


def test_a_wrong_router_is_caught(trained, tmp_path, monkeypatch):
    _, _, run = trained("Qwen3Moe")
    whole = verify.reload

    def damaged(*how):
        model = whole(*how)
        model.model.layers[1].mlp.gate.weight.data.neg_()
        return model

    monkeypatch.setattr(verify, "reload", damaged)
    with pytest.raises(CheckpointError):
        merge(run, tmp_path / "merged")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "stored"),
    [("Qwen3Moe", "hqq8"), ("Qwen3Moe", "nf4"), ("Mixtral", "fp8"), ("GptOss", "mxfp4"), ("Qwen3Moe", "kbit5")],
)
def test_experts_are_quantized_again(name, stored, trained, tmp_path):
    """Packed stacks are merged one expert at a time; the loaded model equals the fp32 merge in the format."""
    _, base, run = trained(name)
    report = merge(run, tmp_path / "merged", base="original", quantize=stored, verify=False)
    reset_notices()  # the loss of few bits is reported
    experts = 3 if name == "Mixtral" else 4
    assert report.experts == (4 * experts, 4 * experts)  # two stacks in each of two layers
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(plain, run / "adapter").merge_and_unload()
    merged = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    found = stacks(merged)
    assert len(found) == 4
    for key, stack in found.items():
        values = expected.get_parameter(key)
        values = values.mT.contiguous() if name == "GptOss" else values
        again = QuantizedTensor.quantize_stack(values.detach(), named(stored), tuple(values.shape))
        close = (stack.dequantize(torch.float32) - again.dequantize(torch.float32)).abs() <= 1e-6
        assert close.float().mean() > 0.999, key  # fp32 sums in another order fall on either side of a step


@pytest.mark.slow
def test_quantized_experts_are_verified(trained, tmp_path, monkeypatch):
    _, _, run = trained("Qwen3Moe")
    report = merge(run, tmp_path / "merged", base="original", quantize="hqq8")
    assert report.targets["original"].explained
    assert report.kept["original"].share > 0.99
    whole = verify.reload

    def damaged(*how):
        model = whole(*how)
        next(iter(stacks(model).values())).data.parts["packed"][3] += 1
        return model

    monkeypatch.setattr(verify, "reload", damaged)
    with pytest.raises(CheckpointError):
        merge(run, tmp_path / "again", base="original", quantize="hqq8")


def test_other_tools_layouts_keep_experts_in_16_bits(trained, tmp_path):
    _, _, run = trained("Qwen3Moe")
    merge(run, tmp_path / "merged", base="original", quantize="bnb-nf4", verify=False)
    merged = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    assert not stacks(merged)
