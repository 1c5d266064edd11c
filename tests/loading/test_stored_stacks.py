"""Mixtures that other tools have quantized, expert by expert: their codes are taken, and their values computed with."""

import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from expert_models import TOKENS, dequantized, mixture, stacks
from merge_runs import byte_tokenizer, save_run
from peft import PeftModel
from published import save_gpt_oss
from safetensors.torch import load_file, save_file

from halfbyte.config import Origin, RunConfig
from halfbyte.export.merge import merge
from halfbyte.formats import Blockwise4
from halfbyte.loading.completeness import check_complete
from halfbyte.loading.load import load_model
from halfbyte.modeling.adapters import add_adapter, load_adapter
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils.errors import CheckpointError, ModelError

PT = {"format": "pt"}
BYTES = {"vocab_size": 272, "eos_token_id": 257, "bos_token_id": 256}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def bitsandbytes(nested):
    def stored(name, weight):
        packed, state = quantize_4bit(weight, quant_type="nf4", compress_statistics=nested)
        entries = {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
        return entries, dequantize_4bit(packed, state)

    return stored


def fp8(name, weight):
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
    tiles = padded.view(len(padded) // 128, 128, -1, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    codes = codes.view(torch.uint8).view(padded.shape)[:rows, :columns].contiguous().view(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}, values.contiguous()


def gptq(order=None):
    """16 inputs a group, or their groups in any order."""

    def stored(name, weight):
        outputs, inputs = weight.shape
        codes = torch.randint(0, 16, (inputs, outputs))
        zeros = torch.randint(0, 16, (inputs // 16, outputs))
        scales = (torch.rand(inputs // 16, outputs) * 0.02).half()
        index = (torch.arange(inputs) if order is None else order(inputs)) // 16
        shifts = 4 * torch.arange(8)
        state = {
            "qweight": (codes.view(-1, 8, outputs) << shifts[:, None]).sum(1),
            "qzeros": (zeros.view(-1, outputs // 8, 8) << shifts).sum(2),
        }
        state = {key: (value + 2**31) % 2**32 - 2**31 for key, value in state.items()}
        entries = {key: value.to(torch.int32) for key, value in state.items()} | {"scales": scales}
        entries["g_idx"] = index.to(torch.int32)
        module = name.removesuffix("weight")
        values = (codes - (zeros + 1)[index] % 16) * scales.float()[index]
        return {f"{module}{key}": value for key, value in entries.items()}, values.T.contiguous()

    return stored


def awq(name, weight):
    outputs, inputs = weight.shape
    codes, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (inputs // 16, outputs))
    scales = (torch.rand(inputs // 16, outputs) * 0.02).half()
    places = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where each of 8 values is in a word

    def words(values):
        packed = (values.view(len(values), -1, 8) << (4 * places)).sum(2)
        return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32)

    module = name.removesuffix("weight")
    entries = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    values = (codes - zeros.repeat_interleave(16, 0)) * scales.float().repeat_interleave(16, 0)
    return {f"{module}{key}": value for key, value in entries.items()}, values.T.contiguous()


PACKED = {  # as llm-compressor writes it; Kimi K2 is so, in groups of 32
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp\\.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
            "input_activations": None,
            "output_activations": None,
        }
    },
}


def scheme(**weights):
    (group,) = PACKED["config_groups"].values()
    return PACKED | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


def pack_quantized(entry):
    """By compressed-tensors itself."""
    (group,) = entry["config_groups"].values()

    def stored(name, weight):
        pytest.importorskip("compressed_tensors")
        from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
        from compressed_tensors.quantization import QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        how = QuantizationScheme.model_validate(group)
        outputs, inputs = weight.shape
        size = how.weights.group_size or inputs
        runs = weight.view(outputs, -1, size)
        scale, zero = calculate_qparams(runs.amin(2), runs.amax(2), how.weights)
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16)}
        state |= {} if how.weights.symmetric else {"weight_zero_point": zero.to(torch.int8)}
        packed = Compressor.compress(state, how)
        module = name.removesuffix("weight")
        values = Compressor.decompress({k: v.float() if "scale" in k else v for k, v in packed.items()}, how)
        return {f"{module}{key}": value for key, value in packed.items()}, values["weight"].contiguous()

    return stored


SCHEMES = {
    "pack-quantized": PACKED,
    "pack-quantized, zeros": scheme(symmetric=False, group_size=64),
    "pack-quantized, channels": scheme(strategy="channel", group_size=None),
}
KINDS = {
    **{kind: (entry, pack_quantized(entry)) for kind, entry in SCHEMES.items()},
    "bitsandbytes": (BNB | {"bnb_4bit_use_double_quant": True}, bitsandbytes(True)),
    "bitsandbytes, plain scales": (BNB, bitsandbytes(False)),
    "fp8": (FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}, fp8),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq()),
    "gptq, desc_act": ({"quant_method": "gptq", "bits": 4}, gptq(lambda n: torch.arange(n).flip(0))),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
}


def checkpoint(folder, entry, stored, name="Qwen3Moe", **keys):
    """A mixture whose matrices but head, embedding and routers are stored so; the model with their values."""
    torch.manual_seed(4)
    model = mixture(name, **(SIZES | {"head_dim": 32} | keys))
    model.save_pretrained(folder)
    entries, twin = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        quantized = key.endswith("_proj.weight")
        own, twin[key] = stored(key, weight) if quantized else ({key: weight}, weight)
        entries |= own
    plain = folder / "plain"
    plain.mkdir()
    save_file(
        {key: value.float().contiguous() for key, value in twin.items()},
        plain / "model.safetensors",
        metadata=PT,
    )
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(
        {key: value.contiguous() for key, value in entries.items()},
        folder / "model.safetensors",
        metadata=PT,
    )
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def load(folder):
    check_complete(Origin(str(folder)), transformers.AutoConfig.from_pretrained(folder))
    return load_model(str(folder), dtype="float32", device="cpu")


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


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
    torch.testing.assert_close(logits(model), logits(dequantized(twin, model)), rtol=0, atol=1e-6)

    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    for key, stack in stacks(model).items():
        assert all(torch.equal(part, stacks(again)[key].parts[each]) for each, part in stack.parts.items())
    assert torch.equal(logits(again), logits(model))


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


def test_experts_left_in_16_bits(tmp_path):
    """A mixture with bitsandbytes' linears as transformers 5 saves it."""
    entry, stored = KINDS["bitsandbytes"]
    twin = checkpoint(tmp_path, entry, lambda key, w: ({key: w}, w) if ".experts." in key else stored(key, w))
    model = load(tmp_path)
    assert not stacks(model)
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight.format, Blockwise4)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-5)


def test_unstackable_experts_are_named(tmp_path):
    torch.manual_seed(1)
    shuffled = gptq(lambda n: torch.randperm(n))
    checkpoint(tmp_path / "order", *({"quant_method": "gptq", "bits": 4}, shuffled))
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj: expert 0: .* different orders"):
        load(tmp_path / "order")

    checkpoint(tmp_path / "tiles", FP8, fp8, moe_intermediate_size=64)
    with pytest.raises(ModelError, match=r"expert 0: fp8:tile: matrices of shape \(64, 128\) cannot be stacked"):
        load(tmp_path / "tiles")


def test_a_damaged_expert_is_named(tmp_path):
    entry, stored = KINDS["fp8"]
    checkpoint(tmp_path, entry, stored)
    entries = load_file(tmp_path / "model.safetensors")
    scale = "model.layers.1.mlp.experts.2.up_proj.weight_scale_inv"
    changes = {
        r"experts\.2\.up_proj\.weight_scale_inv has scales": lambda found: found[scale].fill_(float("nan")),
        r"has \[3, 4\] entries of 4 experts|lacks|missing": lambda found: found.pop(scale),
    }
    for said, change in changes.items():
        own = {key: value.clone() for key, value in entries.items()}
        change(own)
        save_file(own, tmp_path / "model.safetensors", metadata=PT)
        with pytest.raises(CheckpointError, match=said):
            load(tmp_path)


KINDS_PLANNED = ["bitsandbytes", "fp8", "pack-quantized", "bitsandbytes, experts whole", "one layer's experts whole"]


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


@pytest.mark.parametrize(("kind", "entry"), [("gptq", "g_idx"), ("gptq", "qweight"), ("awq", "scales")])
def test_an_expert_without_an_entry_of_the_others_is_named(kind, entry, tmp_path):
    """By its number, where a format can do without the entry, too."""
    checkpoint(tmp_path, *KINDS[kind])
    entries = load_file(tmp_path / "model.safetensors")
    key = f"model.layers.1.mlp.experts.2.up_proj.{entry}"
    entries.pop(key)
    save_file(entries, tmp_path / "model.safetensors", metadata=PT)
    with pytest.raises(CheckpointError, match=rf"lacks {key}|{key} is missing"):
        load(tmp_path)
