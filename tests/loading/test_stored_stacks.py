"""Mixtures that other tools have quantized, expert by expert: their codes are taken, and their values computed with."""

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from halfbyte.adapters.lora import add_adapter, load_adapter
from halfbyte.config import Origin, RunConfig
from halfbyte.export.merge import merge
from halfbyte.loading.completeness import check_complete
from halfbyte.loading.load import load_model
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.expert_models import TOKENS, dequantized, mixture, stacks
from tests.helpers.gpt_oss_checkpoint import save_gpt_oss
from tests.helpers.merge_runs import byte_tokenizer, save_run
from tests.helpers.stored_stacks import FP8, KINDS, PT, checkpoint, fp8, gptq

BYTES = {"vocab_size": 272, "eos_token_id": 257, "bos_token_id": 256}


def load(folder):
    check_complete(Origin(str(folder)), transformers.AutoConfig.from_pretrained(folder))
    return load_model(str(folder), dtype="float32", device="cpu")


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_keep_their_values(kind, tmp_path):
    entry, stored = KINDS[kind]
    twin = checkpoint(tmp_path, entry, stored)
    model = load(tmp_path)
    assert len(stacks(model)) == 4
    for key, stack in stacks(model).items():
        expected = twin.get_parameter(key)
        torch.testing.assert_close(stack.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-5)
    rounding = 4e-6 if "desc_act" in kind else 1e-6  # act-order sums a row's inputs in another order
    torch.testing.assert_close(logits(model), logits(dequantized(twin, model)), rtol=0, atol=rounding)

    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    for key, stack in stacks(model).items():
        assert all(torch.equal(part, stacks(again)[key].parts[each]) for each, part in stack.parts.items())
    assert torch.equal(logits(again), logits(model))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["bitsandbytes", "fp8", "awq", "pack-quantized"])
def test_stored_stacks_train(kind, tmp_path):
    entry, stored = KINDS[kind]
    twin = checkpoint(tmp_path, entry, stored)
    run, found = RunConfig(model_name_or_path="m", dataset="d", output_dir="o", r=4), []
    ours, theirs = (add_adapter(each, run).train() for each in (load(tmp_path), twin))
    own = dict(ours.named_parameters())
    for model in (ours, theirs):
        for key, parameter in model.named_parameters():
            if parameter.requires_grad:  # drawn in the dtype of the weight, which is not the same
                parameter.data.copy_(own[key])
        model(TOKENS, labels=TOKENS).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.requires_grad})
    for key, gradient in found[0].items():
        assert (gradient - found[1][key]).norm() <= 1e-4 * found[1][key].norm(), key


def test_unstackable_experts_are_named(tmp_path):
    torch.manual_seed(1)
    shuffled = gptq(lambda n: torch.randperm(n))
    checkpoint(tmp_path / "order", *({"quant_method": "gptq", "bits": 4}, shuffled))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: expert 0:"):
        load(tmp_path / "order")

    checkpoint(tmp_path / "tiles", FP8, fp8, moe_intermediate_size=64)
    with pytest.raises(ModelError, match=r"expert 0: fp8:tile:.*shape \(64, 128\)"):
        load(tmp_path / "tiles")


def test_a_damaged_expert_is_named(tmp_path):
    entry, stored = KINDS["fp8"]
    checkpoint(tmp_path, entry, stored)
    entries = load_file(tmp_path / "model.safetensors")
    scale = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    changes = {
        r"experts\.2\.up_proj\.weight_scale_inv": lambda found: found[scale].fill_(float("nan")),
        r"\[3, 4\]|up_proj": lambda found: found.pop(scale),
    }
    for said, change in changes.items():
        own = {key: value.clone() for key, value in entries.items()}
        change(own)
        save_file(own, tmp_path / "model.safetensors", metadata=PT)
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


KINDS_PLANNED = ["bitsandbytes", "fp8", "pack-quantized", "bitsandbytes, experts whole", "one layer's experts whole"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS_PLANNED)
def test_planned_bytes_of_stored_stacks(kind, tmp_path):
    entry, stored = KINDS["bitsandbytes" if "whole" in kind else kind]
    whole = {"bitsandbytes, experts whole": ".experts.", "one layer's experts whole": "layers.1.mlp.experts."}.get(kind)
    checkpoint(tmp_path, entry, lambda key, w: ({key: w}, w) if whole and whole in key else stored(key, w))
    model = load(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    shapes = ModelShapes(
        RunConfig(model_name_or_path=str(tmp_path), dataset="d", dtype="float32"), config, torch.device("cpu")
    )
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert shapes.frozen_bytes() == held


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bitsandbytes", "fp8", "pack-quantized"])
def test_merge_onto_stored_stacks(kind, tmp_path):
    """The 16-bit model that comes of it is plain PEFT's on the values that the checkpoint holds."""
    twin = checkpoint(tmp_path / "base", *KINDS[kind], **BYTES)
    byte_tokenizer().save_pretrained(tmp_path / "base")
    run = save_run(tmp_path / "run", tmp_path / "base")
    report = merge(run, tmp_path / "merged")
    assert report.targets["dequantized"].explained
    assert report.experts == (24, 24)
    expected = PeftModel.from_pretrained(twin, run / "adapter").merge_and_unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for (key, mine), theirs in zip(merged.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=1e-6, msg=lambda said, key=key: f"{key}: {said}")


@pytest.mark.slow
def test_gpt_oss_is_trained_and_merged_on_its_own_codes(tmp_path):
    """MXFP4 as it is published: gradients and merge are plain PEFT's on the values of its codes."""
    save_gpt_oss(tmp_path / "base", **BYTES)
    byte_tokenizer().save_pretrained(tmp_path / "base")
    twin = dequantized(mixture("GptOss", **BYTES), load(tmp_path / "base"))
    run = save_run(tmp_path / "run", tmp_path / "base")
    theirs = PeftModel.from_pretrained(twin, run / "adapter", is_trainable=True)
    ours = load_adapter(load(tmp_path / "base"), run / "adapter", "m")
    for key, parameter in ours.named_parameters():
        parameter.requires_grad_("lora_" in key)
    for model in (ours, theirs):
        model.train()(TOKENS, labels=TOKENS).loss.backward()
    expected = dict(theirs.named_parameters())
    trained = {key: p.grad for key, p in ours.named_parameters() if p.requires_grad}
    assert sum(".experts." in key for key in trained) == 8
    for key, gradient in trained.items():
        assert (gradient - expected[key].grad).norm() <= 1e-5 * expected[key].grad.norm(), key

    report = merge(run, tmp_path / "merged")
    assert report.experts == (16, 16)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    values = dict(theirs.merge_and_unload().named_parameters())
    for key, mine in merged.named_parameters():
        torch.testing.assert_close(mine, values[key], rtol=2**-8, atol=1e-6, msg=lambda said, key=key: f"{key}: {said}")
